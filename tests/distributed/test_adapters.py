"""Requests with LoRA adapters get the greedy tokens of the merged models, on any rank, beside requests without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapter_case import (
    add_embeddings,
    chosen,
    make_adapter,
    merge,
    merge_embeddings,
    weight_shapes,
)
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.distributed.test_expert_moves import moving_rank
from tests.family_cases import family_checkpoint
from tests.unit.model_case import small_checkpoint
from workers.config import RankConfig
from workers.lora_config import LoadedAdapter

LIMITS: dict[str, Any] = {
    "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 24},
    "cache": {"block_size": 8, "num_blocks": 48},
    "model": {"max_model_len": 64},
}
NUM_ADAPTERS, NUM_TOKENS = 3, 9
TARGETS = ("q_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
EXCHANGES = (
    *((1, "local"), (2, "shm"), (2, "torch_dist"), (2, "allgather"), (2, "hierarchical")),
    *((3, "shm"), (4, "shm")),
)


def made(base: Path, targets: tuple[str, ...]) -> list[Path]:
    """The checkpoint, then the merged ones of each adapter; `adapters_of` finds the folders."""
    layers = tuple(f"model.layers.{number}." for number in range(3))
    modules = {
        name: it
        for name, it in chosen(weight_shapes(base), targets).items()
        if name.startswith(layers)  # not those of a draft head
    }
    paths, folder = [base], base.parent
    for number in range(1, 1 + NUM_ADAPTERS):
        adapter = make_adapter(folder / f"adapter-{number}", modules, seed=number, alpha=16)
        paths.append(merge(base, adapter, folder / f"model-{number}"))
    return paths


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return made(small_checkpoint(tmp_path_factory.mktemp("adapters") / "base"), TARGETS)


@pytest.fixture(scope="module")
def expert_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = small_checkpoint(tmp_path_factory.mktemp("expert-adapters") / "base")
    return made(base, ("q_proj", *EXPERTS))


@pytest.fixture(scope="module")
def expected(rank_pool: Any, models: list[Path]) -> dict[str, list[int]]:
    return merged(rank_pool, models)


@pytest.fixture(scope="module")
def expected_of_experts(rank_pool: Any, expert_models: list[Path]) -> dict[str, list[int]]:
    return merged(rank_pool, expert_models)


def adapters_of(models: list[Path]) -> tuple[LoadedAdapter, ...]:
    return tuple(
        LoadedAdapter(
            id=number, name=f"a{number}", path=str(models[0].parent / f"adapter-{number}")
        )
        for number in range(1, 1 + NUM_ADAPTERS)
    )


def with_adapters(models: list[Path], ranks: int, max_loras: int, **changes: Any) -> RankConfig:
    sections = {
        name: {**LIMITS.get(name, {}), **changes.get(name, {})} for name in LIMITS | changes
    }
    lora = {"max_loras": max_loras, **sections.pop("lora", {})}
    config = rank_config(models[0], ranks, **sections, lora=lora)
    return config.model_copy(update={"adapters": adapters_of(models)})


def prompts(vocab: int = 256) -> list[list[int]]:
    """Two prompts with one beginning, which is in the prefix cache for one adapter alone, and a short one."""
    generator = np.random.default_rng(0)
    stem = generator.integers(0, vocab, 20).tolist()
    return [stem, [*stem, 7, 9], generator.integers(0, vocab, 3).tolist()]


def events(ranks: int, vocab: int = 256) -> list[Event]:
    """Every prompt for every adapter and none, in an order that mixes them; more adapters than slots."""
    found = []
    for number, prompt in enumerate(prompts(vocab)):
        for adapter in range(1 + NUM_ADAPTERS):
            request = make_request(f"{adapter}-{number}", prompt, max_tokens=NUM_TOKENS)
            place = number * 5 + adapter
            rank, step = place % ranks, 2 * number + adapter
            found.append(Event(step, rank, replace(request, adapter=adapter)))
    return found


def merged(pool: Any, models: list[Path], vocab: int = 256) -> dict[str, list[int]]:
    """The tokens of each request by the merged models, one model after another."""
    found = {}
    for adapter, path in enumerate(models):
        of_model = [
            Event(0, 0, make_request(f"{adapter}-{number}", prompt, max_tokens=NUM_TOKENS))
            for number, prompt in enumerate(prompts(vocab))
        ]
        (result,) = run_engines(pool, rank_config(path, 1, **LIMITS), of_model)
        found |= result.tokens
    return found


def tokens_of(results: list[RankResult]) -> dict[str, list[int]]:
    return {name: tokens for result in results for name, tokens in result.tokens.items()}


@pytest.mark.parametrize(
    ("ranks", "max_loras", "changes"),
    [
        (1, 2, {}),
        (2, 1, {"scheduler": {"async_scheduling": True}}),
        (2, 3, {"overlap": {"mode": "on"}}),
        (1, 3, {"speculation": {"method": "ngram"}, "cache": {"prefix_caching": False}}),
    ],
    ids=["one-rank", "one-slot-async", "ubatches", "drafts"],
)
def test_tokens_equal_those_of_the_merged_models(
    rank_pool: Any,
    models: list[Path],
    expected: dict[str, list[int]],
    ranks: int,
    max_loras: int,
    changes: dict[str, Any],
) -> None:
    config = with_adapters(models, ranks, max_loras, **changes)
    found = tokens_of(run_engines(rank_pool, config, events(ranks)))
    assert found == expected
    assert len({tuple(expected[f"{adapter}-0"]) for adapter in range(1 + NUM_ADAPTERS)}) > 2, (
        "the adapters change the tokens"
    )


@pytest.mark.parametrize(
    ("family", "ranks", "max_loras"),
    [("glm4_moe", 2, 3), ("qwen3_next", 1, 2), ("qwen3_next", 2, 3), ("deepseek_v3", 2, 1)],
)
def test_drafts_of_a_head_are_verified_with_the_adapter(
    rank_pool: Any, tmp_path: Path, family: str, ranks: int, max_loras: int
) -> None:
    """The head drafts by the model without adapter; of few tokens, so that some are right."""
    vocab = 12
    head = {} if family == "qwen3_next" else {"num_nextn_predict_layers": 1}
    base = family_checkpoint(tmp_path, family, "untied", mtp=True, vocab_size=vocab, **head)
    targets = ("q_proj", "kv_b_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj", *EXPERTS)
    models = made(base, targets)
    config = with_adapters(
        models,
        ranks,
        max_loras,
        lora={"targets": ["attention", "mlp", "experts"]},
        scheduler={"async_scheduling": True, "max_num_batched_tokens": 32},
        speculation={"method": "mtp", "num_draft_tokens": 3, "adaptive": False},
    )
    results = run_engines(rank_pool, config, events(ranks, vocab))
    expected = merged(rank_pool, models, vocab)
    assert tokens_of(results) == expected
    assert len({tuple(expected[f"{adapter}-0"]) for adapter in range(1 + NUM_ADAPTERS)}) > 2
    drafts, accepted = (
        sum(getattr(result, f"num_{kind}_tokens") for result in results)
        for kind in ("draft", "accepted")
    )
    assert drafts > accepted > 0


def test_an_adapter_that_cannot_be_read_refuses_its_requests_alone(
    rank_pool: Any, models: list[Path], tmp_path: Path
) -> None:
    config = with_adapters(models, 2, 2)
    gone = config.adapters[1].model_copy(update={"path": str(tmp_path)})
    config = config.model_copy(update={"adapters": (config.adapters[0], gone)})
    results = run_engines(rank_pool, config, [it for it in events(2) if it.request.adapter < 3])
    reasons = {name: reason for result in results for name, reason in result.reasons.items()}
    assert {name for name, reason in reasons.items() if reason == "error"} == {"2-0", "2-1", "2-2"}
    assert "not loaded on this rank" in next(filter(None, (it.errors.get("2-0") for it in results)))


@pytest.mark.parametrize(("ranks", "all2all"), EXCHANGES, ids=[f"{n}-{it}" for n, it in EXCHANGES])
def test_adapters_of_experts_travel_with_the_rows(
    rank_pool: Any,
    expert_models: list[Path],
    expected_of_experts: dict[str, list[int]],
    ranks: int,
    all2all: str,
) -> None:
    """Each rank adds the adapters of its experts to the rows of all ranks; two slots for three adapters."""
    lora = {"targets": ["attention", "experts"]}
    changes = {"lora": lora, "kernels": {"all2all": all2all}}
    if ranks == 3:
        changes["kernels"] |= {"grouped_gemm": "reference"}
    config = with_adapters(expert_models, ranks, 2, **changes)
    found = tokens_of(run_engines(rank_pool, config, events(ranks)))
    assert found == expected_of_experts


@pytest.mark.parametrize(("all2all", "spare"), [("shm", 1), ("allgather", 0)])
def test_adapters_of_experts_that_move(
    rank_pool: Any,
    expert_models: list[Path],
    expected_of_experts: dict[str, list[int]],
    all2all: str,
    spare: int,
) -> None:
    """Layers change their maps every few steps, on two ranks, with two slots for three adapters."""
    config = with_adapters(
        expert_models,
        2,
        2,
        lora={"targets": ["attention", "experts"]},
        kernels={"all2all": all2all},
        experts={"redundant_slots": spare, "rebalance": "auto"},
    )
    found = tokens_of(run_engines(rank_pool, config, events(2), function=moving_rank))
    assert found == expected_of_experts


def test_adapters_of_experts_in_ubatches(
    rank_pool: Any, expert_models: list[Path], expected_of_experts: dict[str, list[int]]
) -> None:
    changes = {"lora": {"targets": ["attention", "experts"]}, "overlap": {"mode": "on"}}
    config = with_adapters(expert_models, 2, 3, **changes)
    found = tokens_of(run_engines(rank_pool, config, events(2)))
    assert found == expected_of_experts


def test_prompt_logprobs_see_the_adapter_of_the_head(rank_pool: Any, tmp_path: Path) -> None:
    base = small_checkpoint(tmp_path / "model-0")
    modules = chosen(weight_shapes(base), ("q_proj",))
    for seed in range(1, 1 + NUM_ADAPTERS):
        adapter = make_adapter(tmp_path / f"adapter-{seed}", modules, seed=seed)
        add_embeddings(adapter, 300, 64, seed=seed)
    merged_path = merge_embeddings(base, tmp_path / "adapter-2", tmp_path / "merged")
    lora = {"targets": ["attention", "embeddings"]}
    config = with_adapters([base], 1, 1, lora=lora)
    prompt = prompts()[0]
    request = make_request("r", prompt, max_tokens=3, prompt_logprobs=2, logprobs=2)
    (found,) = run_engines(rank_pool, config, [Event(0, 0, replace(request, adapter=2))])
    (expected,) = run_engines(
        rank_pool, rank_config(merged_path, 1, **LIMITS), [Event(0, 0, request)]
    )
    assert found.tokens == expected.tokens
    for kind in ("prompt_logprobs", "logprobs"):
        pairs = zip(getattr(found, kind)["r"], getattr(expected, kind)["r"], strict=True)
        for mine, wanted in pairs:
            if wanted is not None:
                assert mine.top_ids == wanted.top_ids
                assert mine.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-4)
