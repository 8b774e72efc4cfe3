"""The CPU's products with weights in four bits against float32 products of what the codes stand for."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels import dense_four_bit
from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.base import ExpertInput
from kernels.backends.select import probe
from kernels.four_bit import FourBitWeights, quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.gated_activation import gated_activation

pytestmark = pytest.mark.skipif(
    "grouped_gemm.native_four_bit" in probe("cpu"), reason="there is no C compiler"
)
FORMATS = [
    FourBitFormat("mxfp4", 32),
    FourBitFormat("int4", 64),
    FourBitFormat("int4", 128, zeros=True, ordered=True),
]
SIZES = {
    "mixed": (3, 0, 17, 1),
    "one_row": (0, 1, 0, 0),
    "no_rows": (0, 0, 0, 0),
    "no_experts": (),
}
HIDDEN, WIDTH = 256, 128


def packed(form: FourBitFormat, *shape: int) -> tuple[FourBitWeights, torch.Tensor]:
    """Random packed weights [e, N, K] and their values; scales of all magnitudes that float16 has."""
    generator = torch.Generator().manual_seed(sum(shape))
    weights = FourBitWeights.empty(form, *shape, device="cpu", tiled=False)
    values = torch.empty(shape)
    for expert in range(shape[0]):
        drawn = torch.randn(shape[1:], generator=generator) / shape[2] ** 0.5
        drawn[:: shape[1] // 4] *= 1e-6
        matrix = quantise_four_bit(drawn, form)
        if matrix.order is not None:
            matrix.order.copy_(torch.randperm(shape[2], generator=generator))
        weights[expert].set(matrix)
        values[expert] = matrix.dequantise()
    return weights, values


def experts(
    form: FourBitFormat,
    sizes: tuple[int, ...],
    activation: Activation = "silu",
    dtype: torch.dtype = torch.float32,
    bias: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `sizes` rows for each expert, and the expected ones in float32."""
    from kernels.grouped_gemm.native_four_bit import NativeFourBit

    generator = torch.Generator().manual_seed(4)
    w13, v13 = packed(form, len(sizes), 2 * WIDTH, HIDDEN)
    w2, v2 = packed(form, len(sizes), HIDDEN, WIDTH)
    x_RD = torch.randn(sum(sizes), HIDDEN, generator=generator).to(dtype)
    b13 = (torch.randn(len(sizes), 2 * WIDTH, generator=generator) * bias).to(dtype)
    b2 = (torch.randn(len(sizes), HIDDEN, generator=generator) * bias).to(dtype)
    offs_e = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    rows: Any = ExpertInput(x_RD, offs_e, None)
    y_RD = NativeFourBit(form)(rows, w13, w2, activation, (b13, b2) if bias else None)
    assert y_RD.dtype == dtype
    expected = []
    for expert, x in enumerate(x_RD.float().split(sizes)):
        h_R2I = F.linear(x, v13[expert], b13[expert].float())
        h_RI = gated_activation(h_R2I, activation)
        expected.append(F.linear(h_RI, v2[expert], b2[expert].float()))
    return y_RD.float(), torch.cat(expected) if expected else x_RD.float()


@pytest.mark.parametrize("label", SIZES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_equals_float32(form: FourBitFormat, label: str) -> None:
    torch.testing.assert_close(*experts(form, SIZES[label]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_biases(activation: Activation) -> None:
    found = experts(FORMATS[0], SIZES["mixed"], activation, bias=6.0)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_other_dtypes_are_rounded_at_the_end_alone(dtype: torch.dtype) -> None:
    found, expected = experts(FORMATS[1], SIZES["mixed"], dtype=dtype, bias=1.0)
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 7, 32, 33])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_dense_products_equal_float32(form: FourBitFormat, rows: int) -> None:
    """On both sides of the number of rows from which the matrix is expanded; rows of a matrix that are no tile."""
    weights, values = packed(form, 1, 98, HIDDEN)
    x_TK = torch.randn(rows, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))[:, :HIDDEN]
    bias_N = torch.arange(98.0)
    for bias in (None, bias_N):
        found = dense_four_bit.multiply(x_TK, weights[0], bias)
        torch.testing.assert_close(found, F.linear(x_TK, values[0], bias), atol=1e-5, rtol=1e-5)
