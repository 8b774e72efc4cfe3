"""The FP8 products of few rows, and rows quantised for them, against float32 of the values that FP8 holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.base import ExpertInput
from kernels.block_fp8 import BlockWeights, Fp8Rows, dequantise, quantise_blocks, quantise_groups
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.deepgemm import DeepGemmFp8
from kernels.grouped_gemm.skinny_fp8 import SkinnyFp8
from kernels.pending import set_yield_ubatch
from kernels.routing.device_routing import DeviceRouting, route_on_device
from kernels.triton import pdl
from kernels.triton.grouped_gemm_fp8 import Fp8Tile, grouped_gemm_fp8
from kernels.triton.quantise_rows import quantise_rows
from tests.closeness import calc_diff
from tests.triton.device import COMPILED, DEVICE
from tests.triton.test_rows import check_quantised, randn

# The interpreter's of what lies at unused places.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EXPERTS, TOP_K = 6, 2
TILES = [Fp8Tile(16, 128, 4, 3, 2), Fp8Tile(32, 128, 4, 2, 2), Fp8Tile(64, 128, 8, 2, 2)]
# Of rounding the activated rows to e4m3, where the interpreter loses carries.
ROUNDED = 2e-3 if COMPILED else 3e-2


def routed(num_rows: int, alignment: int, unaligned_rows: float = 0.0) -> DeviceRouting:
    """Routing to experts 1 to 4 of 6, of which expert 3 gets no row."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, EXPERTS, generator=generator)
    scores[:, 3] = -1
    ids_NK = scores.topk(TOP_K).indices.to(DEVICE)
    experts = range(1, EXPERTS - 1)
    return route_on_device(
        ids_NK,
        experts,
        num_experts=EXPERTS,
        alignment=alignment,
        unaligned_rows=unaligned_rows,
    )


def weights(*shape: int) -> tuple[BlockWeights, torch.Tensor]:
    """FP8 weights whose blocks differ in scale, and their float32 values."""
    drawn = randn(*shape) * (1 + torch.arange(shape[1], device=DEVICE)[None, :, None] // 128)
    rounded = quantise_blocks(drawn / shape[2] ** 0.5)
    matrices = zip(rounded.values, rounded.scales, strict=True)
    return rounded, torch.stack([dequantise(values, scales) for values, scales in matrices])


def spread(x_ND: torch.Tensor) -> torch.Tensor:
    """Rows and groups of 128 of different sizes."""
    rows, columns = (torch.arange(size, device=DEVICE) for size in x_ND.shape)
    return x_ND * (1 + rows[:, None] % 5) * (1 + columns[None] // 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "groups"), [(0, 1), (1, 3), (6, 35)])
def test_quantise_rows(num_rows: int, groups: int, dtype: torch.dtype) -> None:
    """Strided rows; the scales of a group are contiguous and begin at 16 bytes."""
    x = spread(randn(num_rows, groups * 128 + 8))[:, : groups * 128].to(dtype)
    values, scales = quantise_rows(x)
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous()
    assert scales.stride(0) == 1 and (not num_rows or scales.stride(1) % 4 == 0)
    check_quantised(values, scales, x.float())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "alignment", "indexed"), [(1, 1, True), (40, 1, True), (40, 128, False)]
)
@torch.inference_mode()
def test_product_equals_float32(num_rows: int, alignment: int, indexed: bool, tile: Fp8Tile):
    """Widths that end inside a tile, and rows of more than a tile."""
    hidden, width = 256, 192
    routing, (held, exact) = routed(num_rows, alignment), weights(EXPERTS - 2, width, hidden)
    num_x = num_rows if indexed else routing.num_permuted
    values, scales = quantise_groups(spread(randn(num_x, hidden, dtype=torch.bfloat16)))
    row_R = routing.row_R if indexed else None
    bounds = routing.starts_e, routing.ends_e, routing.num_permuted
    y_RD, none = grouped_gemm_fp8(
        Fp8Rows(values, scales), row_R, held, bounds, activation=None, tile=tile, num_sms=3
    )
    assert y_RD.dtype == torch.bfloat16 and none.numel() == 0
    x_ND = values.float() * scales.repeat_interleave(128, 1)
    num_seen = 0
    for local, (start, end) in enumerate(zip(routing.starts_e, routing.ends_e, strict=True)):
        rows = routing.row_R[start:end].long() if indexed else slice(start, end)
        expected = F.linear(x_ND[rows], exact[local])
        num_seen += len(expected)
        if len(expected):
            assert calc_diff(y_RD[start:end], expected) < 2e-5
    assert num_seen == int(routing.offs_e[-1]) and (num_rows == 1 or num_seen)


@pytest.mark.parametrize(
    ("num_rows", "activation"),
    [(1, "silu"), (50, "silu"), (90, "silu"), *((20, name) for name in ACTIVATIONS)],
)
@torch.inference_mode()
def test_experts_equal_float32(num_rows: int, activation: Activation) -> None:
    """All products, with each number of rows that a tile is for."""
    hidden, width = 256, 128
    routing = routed(num_rows, 128)
    w13, exact13 = weights(EXPERTS - 2, 2 * width, hidden)
    w2, exact2 = weights(EXPERTS - 2, hidden, width)
    x_ND = randn(num_rows, hidden, dtype=torch.bfloat16)
    expert_input = ExpertInput(x_ND, routing.offs_e, None, routing)
    y_RD = SkinnyFp8()(expert_input, w13, w2, activation, num_sms=3)
    assert y_RD.shape == (routing.num_permuted, hidden)
    for local, (start, end) in enumerate(zip(routing.starts_e, routing.ends_e, strict=True)):
        x_RD = x_ND[routing.row_R[start:end].long()].float()
        h_RI = gated_activation(F.linear(x_RD, exact13[local]), activation)
        if len(x_RD):
            assert calc_diff(y_RD[start:end], F.linear(h_RI, exact2[local])) < ROUNDED


@torch.inference_mode()
def test_takes_few_rows_alone() -> None:
    """By the mean of even routing; no row is no work of a kernel. Only the rows of DeepGEMM are aligned."""
    x = randn(300, 128, dtype=torch.bfloat16)
    for num_rows, taken in ((0, False), (1, True), (144, True), (145, False), (300, False)):
        routing = routed(num_rows, 128, DeepGemmFp8.unaligned_rows)
        assert not num_rows or routing.alignment == (1 if taken else 128)
        routed_input = ExpertInput(x[:num_rows], routing.offs_e, None, routing)
        assert SkinnyFp8.takes(routed_input) == taken, num_rows


@pytest.mark.parametrize(("num_rows", "columns"), [(8, 64), (9, 128)])
def test_tiles_on_hopper_are_narrow_where_wide_ones_leave_sms(num_rows: int, columns: int) -> None:
    """Of 8 rows, by 2 experts each, 16 * 4 / 6 pairs are local if routing is even, with 2 wide tiles each."""
    gemm, launches = SkinnyFp8(hopper=True), []

    def product(*args: Any, **named: Any) -> Fp8Rows:
        launches.append((named["tile"], named.get("pairs", False)))
        return args[0]

    gemm._kernel = SimpleNamespace(grouped_gemm_fp8=product)
    x, routing = randn(num_rows, 128, dtype=torch.bfloat16), routed(num_rows, 1)
    weights = [BlockWeights.empty(4, *shape, device=DEVICE) for shape in ((512, 128), (128, 256))]
    gemm(ExpertInput(x, routing.offs_e, None, routing), *weights, num_sms=40)
    (up, _), (down, pairs) = launches
    assert (up.columns, down.columns, pairs) == (columns, 128, columns == 64)


@pytest.mark.parametrize(("mean", "rows"), [(1, 16), (10, 16), (16, 32), (20, 32), (48, 64)])
def test_tiles_on_hopper_hold_most_experts_rows(
    mean: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start early; not in ubatches."""
    gemm = SkinnyFp8(hopper=True)
    monkeypatch.setattr(pdl, "supported", lambda: True)
    up, down = gemm.tiles(mean)
    assert up.rows == down.rows == rows and up.early and down.early
    set_yield_ubatch(lambda: None)
    try:
        assert not gemm.tiles(mean)[1].early
        assert pdl.dependent_launch(1) == {"PDL": False, "launch_pdl": False}
    finally:
        set_yield_ubatch(None)
    assert pdl.dependent_launch(64)["PDL"] and not pdl.dependent_launch(65)["PDL"]
