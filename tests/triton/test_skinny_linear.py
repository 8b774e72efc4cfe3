"""Products of few rows by one Triton kernel against torch's in float32."""

import pytest
import torch
from torch.nn import functional as F

from kernels.block_fp8 import BlockWeights, dequantise, quantise_blocks
from kernels.triton import hopper_skinny_fp8
from kernels.triton import skinny_linear as module
from kernels.triton.skinny_linear import skinny_linear, takes_skinny
from tests.closeness import assert_near as assert_within
from tests.triton.device import DEVICE


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        DEVICE, dtype
    )


def exact(
    x: torch.Tensor, weights: torch.Tensor, start: torch.Tensor | None = None
) -> torch.Tensor:
    out = F.linear(x.float(), weights.float())
    return out if start is None else out + start.float()


def assert_near(found: torch.Tensor, expected_f32: torch.Tensor) -> None:
    assert_within(found, expected_f32, {torch.bfloat16: 1e-2, torch.float32: 1e-4})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize(("width", "depth"), [(64, 128), (37, 96), (9, 5000)])
def test_product(dtype: torch.dtype, num_rows: int, width: int, depth: int) -> None:
    x, weights = random(num_rows, depth, dtype=dtype), random(width, depth, dtype=dtype)
    assert_near(skinny_linear(x, weights), exact(x, weights))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_starts_and_rows_that_are_apart(num_rows: int) -> None:
    whole, weights = random(num_rows, 200), random(33, 64)
    x, residual, bias = whole[:, 100:164], random(num_rows, 50)[:, 5:38], random(33)
    assert_near(skinny_linear(x, weights, residual), exact(x, weights, residual))
    assert_near(skinny_linear(x, weights, bias), exact(x, weights, bias))


@pytest.mark.parametrize(("width", "depth"), [(256, 256), (64, 640), (200, 200)])
def test_weights_in_fp8(width: int, depth: int) -> None:
    blocks = quantise_blocks(random(width, depth))
    weights = dequantise(blocks.values, blocks.scales)
    for num_rows in (1, 2, 4):
        x = random(num_rows, depth)
        assert_near(skinny_linear(x, blocks), exact(x, weights))


def test_rows_do_not_change_each_other() -> None:
    x, weights = random(4, 256), random(40, 256)
    together = skinny_linear(x, weights)
    for row in range(4):
        assert torch.equal(skinny_linear(x[row : row + 1], weights)[0], together[row])


def test_what_it_takes() -> None:
    for width, depth, most in (
        (8, 64, module.MOST_SMALL_ROWS),
        (5120, 2048, 0),
        (2048, 4096, module.MOST_DEEP_ROWS),
    ):
        weights = torch.empty(width, depth, dtype=torch.bfloat16, device=DEVICE)
        rows = torch.empty(most + 1, depth, dtype=torch.bfloat16, device=DEVICE)
        assert takes_skinny(rows[:most], weights) == (most > 0) and not takes_skinny(rows, weights)
        assert not takes_skinny(rows[:0], weights)
    assert not takes_skinny(random(64, 2).t(), random(8, 64))
    deep = torch.empty(1, 2 * module.MOST_DEPTH, device=DEVICE)
    assert not takes_skinny(deep, torch.empty(8, 2 * module.MOST_DEPTH, device=DEVICE))


def test_hopper_has_another_kernel_for_deep_rows_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights stay here, weights that the other kernel refuses, and one or two rows."""
    few = module.MOST_ROWS_BESIDE_TENSOR_CORES
    rows = torch.empty(few + 1, module.DEEP, dtype=torch.bfloat16, device=DEVICE)
    most = hopper_skinny_fp8.MOST_WEIGHTS
    assert most == module.MOST_TENSOR_CORE_WEIGHTS
    for width, elsewhere in ((2048, True), (128, False), (most // module.DEEP + 128, False)):
        weights = BlockWeights.empty(width, module.DEEP, device=DEVICE)
        for hopper in (False, True):
            monkeypatch.setattr(module, "_hopper", lambda hopper=hopper: hopper)
            assert takes_skinny(rows, weights) != (hopper and elsewhere)
            assert takes_skinny(rows[:few], weights)
    monkeypatch.setattr(module, "_hopper", lambda: True)
    assert takes_skinny(rows, torch.empty(2048, module.DEEP, dtype=torch.bfloat16, device=DEVICE))
