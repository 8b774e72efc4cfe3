"""The kernels' contracts on one GPU: grouped GEMMs and attention. For exchanges see `test_all2all_cuda`."""

from dataclasses import replace

import pytest
import torch

from kernels.backends import select
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from tests.distributed.rank_pool import GroupInfo
from tests.distributed.test_all2all import CASES, Case, run_cases
from tests.unit.test_kernels_attention import BATCHES, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _bf16(case: Case) -> Case:
    return replace(case, dtype=torch.bfloat16)


@pytest.mark.parametrize("gemm", ["reference", "torch_grouped", "triton"])
@pytest.mark.parametrize("label", CASES)
def test_one_rank(label: str, gemm: str):
    case = _bf16(replace(CASES[label], tokens=CASES[label].tokens[:1]))
    run_cases(0, 1, GroupInfo("one", "", 20), "local", gemm, {label: case}, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", BATCHES)
def test_attention(label: str, dtype: torch.dtype):
    check(BATCHES[label], dtype=dtype, padding=2, device="cuda")


def test_float32_falls_back_to_triton():
    selection = select.select(
        KernelsConfig(),
        select.probe("cuda"),
        BackendShape(
            device="cuda",
            dtype=torch.float32,
            num_ranks=1,
            hidden_size=128,
            moe_intermediate_size=64,
            num_experts=4,
            top_k=2,
            max_num_tokens=16,
        ),
    )
    assert selection.grouped_gemm.name == "triton"
