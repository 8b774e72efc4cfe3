"""Vectors and scores of whole engines equal transformers', in chunks, with the prefix cache, beside generations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_pooling,
    make_request,
    rank_config,
    run_engines,
)
from tests.unit.model_case import small_checkpoint
from tests.unit.pooling_case import base_checkpoint, class_checkpoint, pooled
from workers.lora_config import LoadedAdapter

LIMITS: dict[str, Any] = {
    # A prompt is computed in several steps, beside others.
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
    "cache": {"block_size": 8, "num_blocks": 24},
    "model": {"max_model_len": 64},
}
LENGTHS = (1, 2, 24, 25, 40, 63, 64)
TOLERANCE = 1e-5


def prompts_of(*, shared: int = 0) -> list[list[int]]:
    """Prompts of all lengths; each begins with the same `shared` tokens."""
    generator = np.random.default_rng(0)
    stem = generator.integers(0, 256, shared).tolist()
    return [(stem + generator.integers(0, 256, n).tolist())[:n] for n in LENGTHS]


def serve(
    pool: Any,
    path: Path,
    ranks: int,
    events: list[Event],
    *,
    adapters: tuple[LoadedAdapter, ...] = (),
    **sections: Any,
) -> RankResult:
    """All that the ranks made, as if of one rank."""
    whole = RankResult()
    config = rank_config(path, ranks, **LIMITS, **sections)
    config = config.model_copy(update={"adapters": adapters})
    for result in run_engines(pool, config, in_order(events)):
        whole.tokens |= result.tokens
        whole.vectors |= result.vectors
        whole.reasons |= result.reasons
        whole.cached_tokens |= result.cached_tokens
    return whole


def in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.step)


def named(event: Event, adapter: int) -> Event:
    """The same for an adapter, under a name of its own."""
    assert event.request is not None
    name = f"{adapter} {event.request.request_id}"
    return replace(event, request=replace(event.request, request_id=name, adapter=adapter))


def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param("qwen3_moe", 1, marks=pytest.mark.exhaustive),
        *(("qwen3_moe", 2), ("deepseek_v3", 2)),
    ],
)
def test_embeddings_beside_generations_equal_transformers(rank_pool, tmp_path, family, ranks):
    from transformers import AutoModelForCausalLM

    heads = {"num_kv_heads": 4, "head_dim": None} if family == "deepseek_v3" else {}
    path = small_checkpoint(tmp_path / "model", family=family, **heads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = prompts_of(shared=20)
    events, expected = [], {}
    for number, prompt in enumerate(prompts):
        for rows in ("last", "mean", "cls"):
            name = f"{rows} {number}"
            request = make_pooling(name, prompt, rows=rows)
            events.append(Event(number, number % ranks, request))
            expected[name] = pooled(states_of(model.model, prompt), rows).numpy()
    events += [
        Event(2 * i, i % ranks, make_request(f"text {i}", prompts[i][:30], max_tokens=12))
        for i in range(5)
    ]
    found = serve(rank_pool, path, ranks, events)
    for name, vector in expected.items():
        assert found.reasons[name] == "stop" and found.tokens[name] == []
        np.testing.assert_allclose(found.vectors[name], vector, rtol=0, atol=TOLERANCE)
        if not name.startswith("last"):
            assert found.cached_tokens[name] == 0, "these need every row"
    assert any(found.cached_tokens[name] for name in expected), "no prefix was found"
    for i in range(5):
        prompt = prompts[i][:30]
        assert found.tokens[f"text {i}"] == greedy(model, prompt, 12)


def test_vectors_by_an_adapter_equal_those_of_the_merged_model(rank_pool, tmp_path):
    """Beside vectors of the model and generations with another adapter, for one slot."""
    path = small_checkpoint(tmp_path / "model")
    modules = chosen(weight_shapes(path), ("q_proj", "v_proj", "down_proj"))
    adapters = [make_adapter(tmp_path / f"a{n}", modules, seed=n, alpha=16) for n in (1, 2)]
    paths = [path, *(merge(path, it, tmp_path / f"merged-{it.name}") for it in adapters)]
    of_one = [
        Event(number, number % 2, make_pooling(f"{rows} {number}", prompt, rows=rows))
        for number, prompt in enumerate(prompts_of(shared=20))
        for rows in ("last", "mean")
    ]
    events = [named(event, adapter) for event in of_one for adapter in (0, 1)]
    texts = [Event(n, n % 2, make_request(f"t{n}", [n], max_tokens=6)) for n in range(4)]
    events += [named(event, 2) for event in texts]
    loaded = tuple(
        LoadedAdapter(id=n, name=it.name, path=str(it)) for n, it in enumerate(adapters, 1)
    )
    lora = {"max_loras": 1, "targets": ["attention", "experts"]}
    found = serve(rank_pool, path, 2, events, adapters=loaded, lora=lora)
    for adapter, of_adapter in enumerate((of_one, of_one, texts)):
        expected = serve(rank_pool, paths[adapter], 2, of_adapter)
        for event in of_adapter:
            name = event.request.request_id
            assert found.tokens[f"{adapter} {name}"] == expected.tokens[name]
            if name in expected.vectors:
                vector = found.vectors[f"{adapter} {name}"]
                np.testing.assert_allclose(vector, expected.vectors[name], rtol=0, atol=TOLERANCE)
                assert adapter == 0 or not np.allclose(
                    vector, found.vectors[f"0 {name}"], atol=0.01
                )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_saved_base_model_is_cut_and_normalised(rank_pool, tmp_path, ranks):
    from transformers import AutoModel

    path = base_checkpoint(tmp_path / "model")
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    prompts = prompts_of()
    events = [
        Event(0, i % ranks, make_pooling(str(i), prompt, dimensions=16, normalize=True))
        for i, prompt in enumerate(prompts)
    ]
    found = serve(rank_pool, path, ranks, events)
    for i, prompt in enumerate(prompts):
        vector = torch.nn.functional.normalize(states_of(model, prompt)[-1, :16], dim=0)
        np.testing.assert_allclose(found.vectors[str(i)], vector.numpy(), rtol=0, atol=TOLERANCE)


def test_a_classification_head_equals_transformers(rank_pool, tmp_path):
    from transformers import AutoModelForSequenceClassification

    path = class_checkpoint(tmp_path / "model", 3)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    prompts = prompts_of()
    events = [
        Event(0, i % 2, make_pooling(str(i), prompt, output="classes"))
        for i, prompt in enumerate(prompts)
    ]
    found = serve(rank_pool, path, 2, events)
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(found.vectors[str(i)], logits, rtol=0, atol=TOLERANCE)


def test_a_score_is_the_difference_of_two_logits(rank_pool, tmp_path):
    from transformers import AutoModelForCausalLM

    path = small_checkpoint(tmp_path / "model", classifier_from_token=["n", "y"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = prompts_of()
    events = [
        Event(0, 0, make_pooling(str(i), prompt, output="tokens", token_ids=(110, 121)))
        for i, prompt in enumerate(prompts)
    ]
    found = serve(rank_pool, path, 1, events)
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        score = [float(logits[121] - logits[110])]
        np.testing.assert_allclose(found.vectors[str(i)], score, rtol=0, atol=TOLERANCE)
