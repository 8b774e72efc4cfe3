"""Engines on GPUs whose steps run in microbatches: the tokens of transformers, over every exchange there is."""

from pathlib import Path

import pytest
import torch

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("microbatch") / "model")


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    return generate_references(checkpoint, "cuda")


@pytest.mark.parametrize(
    ("ranks", "all2all"),
    [
        (1, "local"),
        *(
            (ranks, name)
            for ranks in (2, 4)
            for name in ("allgather", "torch_dist", "copy_engine", "symm")
        ),
    ],
)
@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_tokens_equal_transformers(checkpoint, references, ranks, all2all, num_microbatches):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    config = rank_config(
        checkpoint,
        ranks,
        "cuda",
        kernels={"all2all": all2all},
        scheduler={"cuda_graphs": False},
        cache={"num_blocks": "auto", "memory_fraction": 0.2},
        overlap={"mode": "on", "num_microbatches": num_microbatches},
    )
    pool = RankPool(ranks)
    try:
        results = run_engines(
            pool, config, arrivals(references, NUM_PROMPTS, ranks), keep_logits=True
        )
    finally:
        pool.close()
    check(references, results, NUM_PROMPTS, tolerance=1e-3)
    assert all(result.num_microbatched > 0 for result in results)
