"""Hopper's dense products of few rows in FP8 against float32: on such a GPU compiled, without any GPU as Python.

That they compile for Hopper, and fit an SM, is tested in test_forms.py.
"""

from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from kernels.block_fp8 import BlockWeights, quantise_groups
from tests.closeness import calc_diff
from tests.triton.device import COMPILED, FOR_HOPPER, compiled_only
from tests.triton.gluon_in_python import in_python
from tests.triton.test_grouped_gemm_fp8 import spread, weights
from tests.triton.test_rows import randn

pytestmark = pytest.mark.skipif(not FOR_HOPPER, reason="needs a Hopper GPU")

NAME = "kernels.triton.hopper_skinny_fp8"
SUMS = 1e-7 if COMPILED else 1e-9  # Hopper's tensor cores add products of FP8 in about 14 bits


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    return pytest.importorskip(NAME) if COMPILED else in_python(NAME)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 64])
@pytest.mark.parametrize(
    ("width", "depth", "parts"),
    [
        *((192, 128, 1), (64, 384, 3), (128, 2304, 1), (128, 2560, 4)),
        *compiled_only((5120, 2048, 1), (2048, 4096, 4)),
    ],
)
@torch.inference_mode()
def test_equals_float32(
    hopper: ModuleType, width: int, depth: int, parts: int, num_rows: int
) -> None:
    """More inputs than the ring holds, odd numbers of groups, a part of one group."""
    held, exact = weights(1, width, depth)
    x = quantise_groups(spread(randn(num_rows, depth)))
    found = hopper.skinny_fp8(x, held[0], parts)
    assert found.shape == ((num_rows, width) if parts == 1 else (parts, num_rows, width))
    x_TD = x.values.float() * x.scales.repeat_interleave(128, 1)
    total = found if parts == 1 else found.sum(0)
    assert calc_diff(total, F.linear(x_TD, exact[0])) < (2e-5 if parts == 1 else SUMS)


@pytest.mark.skipif(COMPILED, reason="counts calls of the kernel as Python")
@pytest.mark.parametrize(("num_rows", "early"), [(1, True), (16, True), (17, False), (64, False)])
@torch.inference_mode()
def test_the_kernel_after_starts_early_for_few_rows(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch, num_rows: int, early: bool
) -> None:
    """Programs of many rows would meet on the few SMs that this kernel leaves free."""
    starts: list[None] = []
    monkeypatch.setattr(hopper, "start_kernel_after", lambda: starts.append(None))
    hopper.skinny_fp8(quantise_groups(randn(num_rows, 256)), weights(1, 64, 256)[0][0], 2)
    assert len(starts) == (2 * 2 if early else 0)  # groups of warps of two programs


def test_takes_few_rows_and_whole_tiles(hopper: ModuleType) -> None:
    """More rows where several programs share the inputs."""
    cases = ((0, 64, 2, False), (32, 64, 1, True), (33, 64, 1, False), (64, 64, 2, True))
    for num_rows, width, parts, taken in (*cases, (65, 64, 2, False), (8, 96, 1, False)):
        held, _ = weights(1, width, 128)
        assert hopper.takes(quantise_groups(randn(num_rows, 128)), held[0], parts) == taken
    large = BlockWeights.empty(8192, 4096, device="cpu")
    assert not hopper.takes(quantise_groups(randn(1, 4096)), large, 1)


@pytest.mark.parametrize(
    ("width", "depth", "parts"),
    [(5120, 2048, 1), (2048, 4096, 4), (2112, 7168, 4), (512, 7168, 14), (64, 128, 1)],
)
def test_parts_fill_the_sms(hopper: ModuleType, width: int, depth: int, parts: int) -> None:
    """As many programs as SMs at most, and equal parts."""
    held = BlockWeights.empty(width, depth, device="cpu")
    assert hopper.parts_of(held) == parts
