"""Greedy tokens and logits equal transformers', whatever the ranks, backends, chunks and preemptions."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from workers.checkpoint import make_checkpoint

NUM_PROMPTS, NEW_TOKENS = 48, 12
TIE = 1e-3  # closer best logits than this are a tie, told apart by rounding alone


@dataclass
class Reference:
    """What transformers generates: tokens, and the logits each one was chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "model"
    # 10 experts: they divide by neither 3 nor 4 ranks.
    make_checkpoint(path, num_layers=2, hidden_size=64, num_experts=10, head_dim=32, vocab_size=384)
    return path


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generator = np.random.default_rng(0)
    shared = generator.integers(0, 256, 300).tolist()
    lengths = [
        1,
        2,
        15,
        16,
        17,
        600,
        *generator.integers(1, 120, NUM_PROMPTS - 10),
        599,
        257,
        256,
        400,
    ]
    references = []
    for index, length in enumerate(lengths):
        own = generator.integers(0, 256, length).tolist()
        prompt = (shared + own)[:length] if index % 3 == 0 else own
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(found.logits).float().numpy()
        references.append(Reference(prompt, found.sequences[0, length:].tolist(), logits))
    return references


def check(references: list[Reference], results: list[RankResult], count: int) -> None:
    """Equal tokens up to the first tie, logits within 1e-4 as long as the tokens agree."""
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    logits = {name: rows for result in results for name, rows in result.logits.items()}
    reasons = {name: why for result in results for name, why in result.reasons.items()}
    assert reasons == {str(index): "length" for index in range(count)}
    ties = 0
    for index, reference in enumerate(references[:count]):
        best = np.sort(reference.logits, axis=-1)
        clear = best[:, -1] - best[:, -2] >= TIE
        upto = NEW_TOKENS if clear.all() else int(np.argmin(clear))
        ties += upto < NEW_TOKENS
        assert tokens[str(index)][:upto] == reference.tokens[:upto], f"prompt {index}"
        if logits:
            mine = np.stack(logits[str(index)])
            assert len(mine) == NEW_TOKENS
            seen = min(upto + 1, NEW_TOKENS)
            worst = np.abs(mine[:seen] - reference.logits[:seen]).max()
            assert worst < 1e-4, f"prompt {index}: logits differ by {worst:.2e}"
    assert ties <= count // 4, f"{ties} of {count} references have ties: a useless reference"


def arrivals(references: list[Reference], count: int, num_ranks: int) -> list[Event]:
    return [
        Event(
            index % 5,
            index % num_ranks,
            make_request(str(index), ref.prompt, max_tokens=NEW_TOKENS),
        )
        for index, ref in enumerate(references[:count])
    ]


CASES = [
    (ranks, all2all, gemm, chunked)
    for ranks in (1, 2, 3, 4)
    for all2all in (("local",) if ranks == 1 else ("torch_dist", "allgather", "shm"))
    for gemm in ("reference", "torch_grouped")
    for chunked in (True, False)
    if gemm == "torch_grouped" or chunked  # the plain product needs no second round
]


@pytest.mark.parametrize(("ranks", "all2all", "gemm", "chunked"), CASES)
def test_tokens_and_logits_equal_transformers(
    rank_pool,
    checkpoint,
    references,
    ranks,
    all2all,
    gemm,
    chunked,
):
    config = rank_config(
        checkpoint,
        ranks,
        kernels={"all2all": all2all, "grouped_gemm": gemm},
        scheduler={"chunked_prefill": chunked, "max_num_batched_tokens": 128 if chunked else 1024},
    )
    results = run_engines(
        rank_pool, config, arrivals(references, NUM_PROMPTS, ranks), keep_logits=True
    )
    check(references, results, NUM_PROMPTS)
    assert len({result.num_steps for result in results}) == 1, "ranks ran different steps"


@pytest.mark.parametrize(
    ("ranks", "all2all"), [(1, "local"), (2, "shm"), (3, "torch_dist"), (4, "allgather")]
)
def test_preemption_changes_no_token(rank_pool, checkpoint, references, ranks, all2all):
    config = rank_config(
        checkpoint, ranks, kernels={"all2all": all2all}, cache={"num_blocks": 48, "block_size": 16}
    )
    results = run_engines(
        rank_pool, config, arrivals(references, NUM_PROMPTS, ranks), keep_logits=False
    )
    check(references, results, NUM_PROMPTS)
    assert sum(result.num_preemptions for result in results) > 0


@pytest.mark.parametrize("all2all", ["torch_dist", "allgather", "shm"])
@pytest.mark.parametrize("count", [1, 3])
def test_fewer_prompts_than_ranks(rank_pool, checkpoint, references, all2all, count):
    config = rank_config(checkpoint, 4, kernels={"all2all": all2all})
    results = run_engines(rank_pool, config, arrivals(references, count, 4), keep_logits=True)
    check(references, results, count)
