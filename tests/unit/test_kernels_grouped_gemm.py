"""Every grouped GEMM gives what a plain loop over rows gives."""

import pytest
import torch
from torch.nn import functional as F

from kernels.all2all.base import ExpertInput
from kernels.backends.select import probe
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.native import NativeGroupedGemm
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.grouped_gemm.torch_grouped import TorchGroupedGemm

GEMMS: list[GroupedGemm] = [ReferenceGroupedGemm(), TorchGroupedGemm()]
if "grouped_gemm.native" not in probe("cpu"):
    GEMMS.append(NativeGroupedGemm())

SIZES = {
    "mixed": (3, 0, 17, 1),
    "one_expert": (0, 0, 9, 0),
    "one_row": (0, 1, 0, 0),
    "no_rows": (0, 0, 0, 0),
    "no_experts": (),
    "many": (40, 33, 70, 51),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
@pytest.mark.parametrize("label", SIZES)
@pytest.mark.parametrize("own_weights", [False, True])
def test_equals_a_loop_over_rows(
    own_weights: bool, label: str, gemm: GroupedGemm, dtype: torch.dtype
):
    if gemm.name == "native" and dtype != torch.float32:
        pytest.skip("native computes in float32")
    sizes, hidden, width = SIZES[label], 32, 24
    generator = torch.Generator().manual_seed(1)
    x_RD = torch.randn(sum(sizes), hidden, generator=generator).to(dtype)
    w13 = (torch.randn(len(sizes), 2 * width, hidden, generator=generator) / 6).to(dtype)
    w2 = (torch.randn(len(sizes), hidden, width, generator=generator) / 5).to(dtype)
    if own_weights:
        w13, w2 = (
            gemm.empty_weights(*w.shape, device="cpu", dtype=dtype).copy_(w) for w in (w13, w2)
        )
    offs_e = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    y_RD = gemm(ExpertInput(x_RD, offs_e, None), w13, w2)
    assert y_RD.dtype == dtype and y_RD.shape == x_RD.shape
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    for row, expert in enumerate(experts):
        gate, up = (w13[expert].float() @ x_RD[row].float()).chunk(2)
        expected_D = w2[expert].float() @ (F.silu(gate) * up)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(y_RD[row].float(), expected_D, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
def test_leaves_its_input_alone(gemm: GroupedGemm):
    x_RD = torch.randn(6, 8)
    before = x_RD.clone()
    gemm(
        ExpertInput(x_RD, torch.tensor([2, 6], dtype=torch.int32), None),
        torch.randn(2, 8, 8),
        torch.randn(2, 8, 4),
    )
    assert torch.equal(x_RD, before)
