"""Whole engines on GPUs, a rank each, over every exchange: greedy tokens equal transformers' on a CPU, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import need_gpus
from tests.distributed.engine_harness import RankResult, rank_config, run_engines
from tests.distributed.reference import (
    Reference,
    arrivals,
    check,
    generate_references,
    write_checkpoint,
)
from tests.gpu.pools import Pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

COUNT = 24  # prompts, the first ones, of 1 to 600 tokens
EXCHANGES = [
    (1, "local"),
    *((r, name) for r in (2, 4) for name in ("allgather", "torch_dist", "copy_engine", "symm")),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parity") / "model")


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    """On the CPU, so that nothing of the GPU's arithmetic is taken for granted; 3 s on two cores."""
    return generate_references(checkpoint, "cpu")[:COUNT]


def _run(
    pools: Pools,
    checkpoint: Path,
    references: list[Reference],
    ranks: int,
    all2all: str,
    grouped_gemm: str,
    **sections: Any,
) -> list[RankResult]:
    need_gpus(ranks)
    config = rank_config(
        checkpoint,
        ranks,
        "cuda",
        kernels={"all2all": all2all, "grouped_gemm": grouped_gemm},
        cache={"num_blocks": 256},
        **sections,
    )
    events = arrivals(references, COUNT, ranks)
    results = run_engines(pools, config, events, keep_logits=True, timeout_s=60)
    check(references, results, COUNT, tolerance=1e-3)
    return results


# The products that compute in float32, each with every exchange.
@pytest.mark.parametrize(("ranks", "all2all"), EXCHANGES)
@pytest.mark.parametrize("grouped_gemm", ["triton", "reference"])
def test_tokens_equal_transformers(pools, checkpoint, references, ranks, all2all, grouped_gemm):
    _run(pools, checkpoint, references, ranks, all2all, grouped_gemm)


@pytest.mark.parametrize(("ranks", "all2all"), EXCHANGES)
@pytest.mark.parametrize(("grouped_gemm", "num_ubatches"), [("triton", 2), ("reference", 3)])
def test_in_microbatches_too(
    pools, checkpoint, references, ranks, all2all, grouped_gemm, num_ubatches
):
    results = _run(
        pools,
        checkpoint,
        references,
        ranks,
        all2all,
        grouped_gemm,
        scheduler={"cuda_graphs": False},
        overlap={"mode": "on", "num_ubatches": num_ubatches},
    )
    assert all(result.num_microbatched > 0 for result in results)
