"""Greedy tokens and logits equal transformers', whatever the ranks, backends, chunks and preemptions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.engine_harness import rank_config, run_engines
from tests.distributed.rank_pool import RankPool
from tests.distributed.reference import (
    NUM_PROMPTS,
    Reference,
    arrivals,
    check,
    generate_references,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parity") / "model")


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    return generate_references(checkpoint)


PLACES = [
    (ranks, all2all)
    for ranks in (1, 2, 3, 4)
    for all2all in (("local",) if ranks == 1 else ("torch_dist", "allgather", "shm"))
]
# Only `auto` needs a round of whole prompts.
PRODUCTS = [("auto", True), ("reference", True), ("auto", False), ("torch_grouped", True)]
# Each place with one product in turn; with all products is exhaustive.
CASES = [
    pytest.param(
        *place, *product, marks=[] if number % len(PRODUCTS) == turn else pytest.mark.exhaustive
    )
    for number, place in enumerate(PLACES)
    for turn, product in enumerate(PRODUCTS)
] + [(2, "hierarchical", "auto", True), (4, "hierarchical", "auto", False)]


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
        kernels={
            "all2all": all2all,
            "grouped_gemm": gemm,
            "attention": "auto" if gemm == "auto" else "sdpa",
        },
        scheduler={"chunked_prefill": chunked, "max_num_batched_tokens": 128 if chunked else 1024},
    )
    results = run_engines(
        rank_pool, config, arrivals(references, NUM_PROMPTS, ranks), keep_logits=True
    )
    check(references, results, NUM_PROMPTS)
    assert len({result.num_steps for result in results}) == 1, "ranks ran different steps"


@pytest.mark.parametrize(
    ("ranks", "all2all"),
    [
        (1, "local"),
        pytest.param(2, "shm", marks=pytest.mark.exhaustive),
        pytest.param(3, "torch_dist", marks=pytest.mark.exhaustive),
        (4, "allgather"),
    ],
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


@pytest.mark.parametrize(
    ("all2all", "count"),
    [
        *(("torch_dist", 1), ("allgather", 3), ("shm", 1), ("hierarchical", 3)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("torch_dist", 3), ("allgather", 1), ("shm", 3), ("hierarchical", 1))
        ),
    ],
)
def test_fewer_prompts_than_ranks(rank_pool, checkpoint, references, all2all, count):
    config = rank_config(checkpoint, 4, kernels={"all2all": all2all})
    results = run_engines(rank_pool, config, arrivals(references, count, 4), keep_logits=True)
    check(references, results, count)


@pytest.fixture(scope="module")
def large_pool() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "all2all"), [(8, "shm"), (7, "torch_dist"), (6, "allgather"), (5, "shm")]
)
def test_five_to_eight_ranks(large_pool, checkpoint, references, ranks, all2all):
    config = rank_config(checkpoint, ranks, kernels={"all2all": all2all})
    results = run_engines(large_pool, config, arrivals(references, 6, ranks), keep_logits=True)
    check(references, results, 6)
