"""Linear layers in the model's dtype: bias, residual, and products in float32. test_dense_fp8 has the form in FP8."""

import pytest
import torch
from torch.nn import functional as F

from kernels.block_fp8 import BlockWeights
from kernels.gated_activation import gated_activation
from workers.layers.linear import DenseLinear, Fp8Linear

torch.set_num_threads(1)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_adds_bias_and_residual(dtype: torch.dtype, num_rows: int, biased: bool) -> None:
    """Few rows and many, which other kernels multiply."""
    x, weight = draw(num_rows, 16, dtype=dtype), draw(6, 16, dtype=dtype)
    bias = draw(6, dtype=dtype) if biased else None
    residual = draw(num_rows, 6, dtype=dtype)
    kept = residual.clone()
    linear = DenseLinear(weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    near = (
        1e-5 if dtype == torch.float32 else 2**-6
    )  # bias and residual may be added one after the other
    for found, exact in (
        (linear(x), expected),
        (linear(x, partial=True), expected),
        (linear(x, residual), expected + residual.double()),
    ):
        assert found.shape == (num_rows, 6)
        torch.testing.assert_close(found, exact.to(dtype), atol=near, rtol=near)
    assert torch.equal(residual, kept), "a new tensor is returned"


def test_weights_are_read_at_each_call() -> None:
    linear = DenseLinear(torch.zeros(4, 8), torch.zeros(4))
    x, residual = draw(20, 8), draw(20, 4)
    linear.weight.copy_(draw(4, 8))
    linear.bias.fill_(2.0)
    expected = x @ linear.weight.t() + 2
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear(x, residual), expected + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_float32(dtype: torch.dtype) -> None:
    x, weight = draw(5, 64, dtype=dtype), draw(7, 64, dtype=dtype)
    found = DenseLinear(weight).in_float32(x)
    torch.testing.assert_close(found, x.float() @ weight.float().t())


def test_activates_in_the_models_dtype() -> None:
    linear, gate_up = DenseLinear(draw(4, 8)), draw(3, 16)
    assert not linear.takes_fp8(gate_up)
    assert torch.equal(linear.activate(gate_up, "silu"), gated_activation(gate_up, "silu"))


def test_fp8_rows_are_made_on_gpus_alone() -> None:
    held = BlockWeights.empty(128, 128, device="cpu")
    assert not Fp8Linear(held).takes_fp8(torch.zeros(2, 128))
