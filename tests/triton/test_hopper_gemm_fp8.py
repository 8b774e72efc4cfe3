"""Hopper's FP8 products of few rows against float32: on such a GPU compiled, without any GPU as Python.

That they compile for Hopper, and fit an SM, is tested in test_forms.py.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from kernels.activation import ACTIVATIONS, Activation
from kernels.block_fp8 import Fp8Rows, quantise_groups
from kernels.gated_activation import gated_activation
from kernels.triton.grouped_gemm_fp8 import grouped_gemm_fp8
from tests.closeness import calc_diff
from tests.in_turn import in_turn
from tests.triton.device import COMPILED, DEVICE, FOR_HOPPER, compiled_only
from tests.triton.gluon_in_python import in_python
from tests.triton.test_grouped_gemm_fp8 import spread, weights
from tests.triton.test_hopper_gemm import _place
from tests.triton.test_rows import randn

pytestmark = pytest.mark.skipif(not FOR_HOPPER, reason="needs a Hopper GPU")

NAME = "kernels.triton.hopper_gemm_fp8"
# Rows of each expert: none, one, around the halves of tiles and whole ones.
EDGES = [0, 1, 7, 8, 9, 0, 15, 16, 17, 33, 65, 0]
COUNTS = {"edges": EDGES, "one": [70], "nobody": [0, 0, 0]}
if COMPILED:
    COUNTS |= {"many": list(range(64)), "even": [16] * 64}
TILES = [(16, 6), (32, 5), (64, 4)]


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    return pytest.importorskip(NAME) if COMPILED else in_python(NAME)


@pytest.mark.parametrize(
    ("gated", "indexed", "shape", "tile", "counts", "gap", "num_sms"),
    in_turn(
        3,
        [
            (True, True, (256, 384)),
            (True, False, (128, 128)),
            (False, True, (192, 256)),
            (False, False, (320, 128)),
            *compiled_only((True, True, (768, 2048)), (False, False, (2048, 768))),
        ],
        [(tile,) for tile in TILES],
        COUNTS.values(),
        [(0, 1), (37, 5), (0, 132)],
    ),
)
@torch.inference_mode()
def test_equals_float32(hopper, gated, indexed, shape, tile, counts, gap, num_sms):
    """Widths of whole tiles and of parts; rows come by an index or in order."""
    check(hopper, "silu" if gated else None, indexed, shape, tile, counts, gap, num_sms)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.inference_mode()
def test_activations_equal_float32(hopper, activation):
    check(hopper, activation, True, (128, 256), (32, 5), [1, 0, 35], 3, 5)


@pytest.mark.parametrize(("gap", "num_sms"), [(0, 1), (37, 5)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("activation", "tile", "shape"),
    [
        ("silu", (16, 12, False, 64), (256, 384)),
        ("silu", (32, 5, False, 64), (128, 128)),
        (None, (16, 6), (192, 256)),
        (None, (32, 4), (320, 128)),
    ],
)
@torch.inference_mode()
def test_pairs_equal_float32(hopper, activation, tile, shape, counts, gap, num_sms):
    """The first product returns, and the second takes, two rows for each row, with a scale for each 64 values."""
    check(hopper, activation, activation is not None, shape, tile, counts, gap, num_sms, pairs=True)


def test_products_wait_for_the_ring_alone() -> None:
    """A load of scales in each group of inputs would take longer than the product of few rows."""
    spec = find_spec(NAME)
    assert spec is not None and spec.origin is not None
    functions = ast.parse(Path(spec.origin).read_text()).body
    (tile,) = (it for it in functions if getattr(it, "name", "") == "_multiply_tile")
    called = {ast.unparse(it.func) for it in ast.walk(tile) if isinstance(it, ast.Call)}
    assert "warpgroup_mma" in called and "gl.load" not in called


def check(
    hopper: ModuleType,
    activation: Activation | None,
    indexed: bool,
    shape: tuple[int, int],
    tile: tuple[int, ...],
    counts: list[int],
    gap: int,
    num_sms: int,
    pairs: bool = False,
) -> None:
    """Compare the kernel with a float32 product of each expert's rows; activation None: not gated."""
    width, depth = shape
    starts, ends, num_permuted = _place(counts, gap)
    held, exact = weights(len(counts), width * (1 if activation is None else 2), depth)
    num_rows = 50 if indexed else num_permuted
    plain = spread(randn(num_rows, depth))
    in_pairs = pairs and activation is None
    x = rows_among_others(quantise_groups(in_halves(plain) if in_pairs else plain))
    row_R = None
    if indexed:
        generator = torch.Generator().manual_seed(gap)
        drawn = torch.randint(num_rows, (num_permuted,), generator=generator)
        row_R = drawn.to(DEVICE, torch.int32)
    out = grouped_gemm_fp8(
        *(x, row_R, held, (starts, ends, num_permuted)),
        activation=activation,
        tile=hopper.HopperFp8Tile(*tile),
        num_sms=num_sms,
        pairs=in_pairs,
    )
    x_ND = x.values.float() * x.scales.repeat_interleave(128, 1)
    if in_pairs:
        x_ND = x_ND[::2] + x_ND[1::2]
    ordered = x_ND if row_R is None else x_ND[row_R.long()]
    found = out.values.float()
    if activation is not None:
        assert out.scales.stride(0) == 1
        found = found * out.scales.repeat_interleave(128, 1)
        if pairs:
            found = found[::2] + found[1::2]
    for expert, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        expected = F.linear(ordered[start:end], exact[expert])
        if activation is not None:
            expected = gated_activation(expected, activation)
        if end > start:
            limit = 2e-5 if activation is None else 2e-3
            assert calc_diff(found[start:end], expected) < limit


def in_halves(x_RD: torch.Tensor) -> torch.Tensor:
    """Two rows for each row, of the first and of the other 64 values of each group of 128."""
    halves = x_RD.unflatten(1, (-1, 2, 64))
    apart = torch.eye(2, device=x_RD.device)[:, None, :, None] * halves.unsqueeze(1)
    return apart.flatten(2).flatten(0, 1)


def rows_among_others(rows: Fp8Rows) -> Fp8Rows:
    """The rows as views of bytes, as an all-to-all receives them: values, scales, others."""
    num_rows, depth = rows.values.shape
    whole = torch.zeros(num_rows, depth + depth // 32 + 48, dtype=torch.uint8, device=DEVICE)
    whole = whole[:, : (depth + depth // 32) // 16 * 16 + 16].contiguous()
    values = whole[:, :depth].view(torch.float8_e4m3fn)
    scales = whole[:, depth : depth + depth // 32].view(torch.float32)
    values.copy_(rows.values)
    scales.copy_(rows.scales)
    return Fp8Rows(values, scales)
