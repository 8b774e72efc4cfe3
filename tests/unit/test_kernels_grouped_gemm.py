"""Every grouped GEMM gives what a plain loop over rows gives."""

import math
from collections.abc import Callable

import pytest
import torch

from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.base import ExpertInput
from kernels.backends.select import probe
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.native import NativeGroupedGemm
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.grouped_gemm.torch_grouped import TorchGroupedGemm

GEMMS: list[GroupedGemm] = [ReferenceGroupedGemm(), TorchGroupedGemm()]
if "grouped_gemm.native" not in probe("cpu"):
    GEMMS.append(NativeGroupedGemm())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITH_DTYPES = [
    pytest.param(gemm, dtype, id=f"{gemm.name}-{dtype}")
    for gemm in GEMMS
    for dtype in (DTYPES if gemm.name != "native" else (torch.float32,))
]

# Written out, because the backends share gated_activation.
FUNCTIONS: dict[Activation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda x, up: up * x / (1 + (-x).exp()),
    "gelu": lambda x, up: up * x * (1 + (x / 2**0.5).erf()) / 2,
    "gelu_tanh": lambda x, up: (
        up * x * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2
    ),
    "clamped_swiglu": lambda x, up: (
        (up.clamp(-7, 7) + 1) * x.clamp(max=7) / (1 + (-1.702 * x.clamp(max=7)).exp())
    ),
}
SIZES = {
    "mixed": (3, 0, 17, 1),
    "one_expert": (0, 0, 9, 0),
    "one_row": (0, 1, 0, 0),
    "no_rows": (0, 0, 0, 0),
    "no_experts": (),
    "many": (40, 33, 70, 51),
}


@pytest.mark.parametrize(("gemm", "dtype"), WITH_DTYPES)
@pytest.mark.parametrize("label", SIZES)
@pytest.mark.parametrize("own_weights", [False, True])
def test_equals_a_loop_over_rows(
    own_weights: bool, label: str, gemm: GroupedGemm, dtype: torch.dtype
):
    check(gemm, SIZES[label], dtype, "silu", own_weights)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
@pytest.mark.parametrize("label", ["mixed", "many"])
def test_every_activation(label: str, gemm: GroupedGemm, activation: Activation):
    check(gemm, SIZES[label], torch.float32, activation, True)


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
@pytest.mark.parametrize("label", SIZES)
def test_biases_are_added(label: str, gemm: GroupedGemm, activation: Activation):
    """Wide enough that clamped values occur."""
    check(gemm, SIZES[label], torch.float32, activation, True, bias=6.0)


def check(
    gemm: GroupedGemm,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    activation: Activation,
    own_weights: bool,
    *,
    bias: float = 0,
) -> None:
    """Compare the product of `sizes` rows for each expert with a float32 product of each row."""
    hidden, width = 32, 24
    generator = torch.Generator().manual_seed(1)
    x_RD = torch.randn(sum(sizes), hidden, generator=generator).to(dtype)
    w13 = (torch.randn(len(sizes), 2 * width, hidden, generator=generator) / 6).to(dtype)
    w2 = (torch.randn(len(sizes), hidden, width, generator=generator) / 5).to(dtype)
    if own_weights:
        w13, w2 = (
            gemm.empty_weights(*w.shape, device="cpu", dtype=dtype).copy_(w) for w in (w13, w2)
        )
    offs_e = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    b13 = torch.randn(len(sizes), 2 * width, generator=generator).to(dtype) * bias
    b2 = torch.randn(len(sizes), hidden, generator=generator).to(dtype) * bias
    biases = (b13, b2) if bias else None
    y_RD = gemm(ExpertInput(x_RD, offs_e, None), w13, w2, activation, biases)
    assert y_RD.dtype == dtype and y_RD.shape == x_RD.shape
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    for row, expert in enumerate(experts):
        gate, up = (w13[expert].float() @ x_RD[row].float() + b13[expert].float()).chunk(2)
        inner_I = FUNCTIONS[activation](gate, up)
        expected_D = w2[expert].float() @ inner_I + b2[expert].float()
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
