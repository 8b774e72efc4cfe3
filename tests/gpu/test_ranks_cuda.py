"""Whole engines on GPUs, a rank each, over every exchange there is: greedy tokens equal transformers' in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.engine_harness import RankResult, rank_config, run_engines
from tests.distributed.rank_pool import RankPool
from tests.distributed.reference import (
    NUM_PROMPTS,
    Reference,
    arrivals,
    check,
    generate_references,
    write_checkpoint,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parity") / "model")


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    return generate_references(checkpoint, "cuda")


EXCHANGES = [
    (1, "local"),
    *((r, name) for r in (2, 3, 4) for name in ("allgather", "torch_dist", "copy_engine", "symm")),
]


def _run(
    checkpoint: Path, references: list[Reference], ranks: int, all2all: str, **sections: Any
) -> list[RankResult]:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    config = rank_config(
        checkpoint,
        ranks,
        "cuda",
        kernels={"all2all": all2all},
        cache={"num_blocks": "auto", "memory_fraction": 0.2},
        **sections,
    )
    pool = RankPool(ranks)
    try:
        results = run_engines(
            pool, config, arrivals(references, NUM_PROMPTS, ranks), keep_logits=True
        )
    finally:
        pool.close()
    check(references, results, NUM_PROMPTS, tolerance=1e-3)
    return results


@pytest.mark.parametrize(("ranks", "all2all"), EXCHANGES)
def test_tokens_equal_transformers(checkpoint, references, ranks, all2all):
    _run(checkpoint, references, ranks, all2all)


@pytest.mark.parametrize(("ranks", "all2all"), EXCHANGES)
@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_in_microbatches_too(checkpoint, references, ranks, all2all, num_microbatches):
    results = _run(
        checkpoint,
        references,
        ranks,
        all2all,
        scheduler={"cuda_graphs": False},
        overlap={"mode": "on", "num_microbatches": num_microbatches},
    )
    assert all(result.num_microbatched > 0 for result in results)
