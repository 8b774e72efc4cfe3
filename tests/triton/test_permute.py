"""Rows to expert order and back: what the CPU's routing says."""

import pytest
import torch

from kernels.all2all.base import ExpertInput
from kernels.routing.device_routing import max_permuted, route_on_device
from kernels.routing.permute import expert_bounds, route, weighted_sum
from kernels.triton import weighted_sum as kernel
from kernels.triton.quantise_rows import empty_rows, quantise_rows
from kernels.triton.scan_counts import scan_counts
from tests.in_turn import in_turn
from tests.triton.device import DEVICE, compiled_only

# rows, top-k, experts, local experts; from 600 x 8 pairs on they are counted first, in chunks
SHAPES = [
    (1, 8, 128, range(32)),
    (7, 3, 8, range(2, 6)),
    (5, 2, 3, range(1, 1)),
    (0, 4, 16, range(16)),
    (3, 1, 1, range(1)),
    (512, 8, 128, range(96, 128)),
    (700, 8, 128, range(32, 64)),
    (601, 8, 16, range(9)),
    *compiled_only((9000, 8, 256, range(256))),
]
# The interpreter takes a millisecond for each row of an expert's input, also for an unused one.
THERE_AND_BACK = [*SHAPES[:5], (16, 8, 128, range(96, 104)), *compiled_only(*SHAPES[5:8])]


def draw(shape, dtype=torch.int64) -> torch.Tensor:
    """topk_idx_NK on the CPU, some of them -1."""
    num_rows, top_k, num_experts, _ = shape
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    topk_idx_NK = scores.topk(top_k, dim=-1).indices.to(dtype)
    topk_idx_NK[num_rows // 2 : num_rows // 2 + 2] = -1
    topk_idx_NK[: num_rows // 3, 0] = -1
    return topk_idx_NK


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_few_rows_are_quantised_beside(num_rows: int, alignment: int):
    """As by a launch of their own, and the routing is that without them."""
    ids = draw((num_rows, 3, 8, range(8))).to(DEVICE)
    x_ND = torch.randn(num_rows, 2 * 2304, device=DEVICE).bfloat16()[:, :2304]
    rows = empty_rows(x_ND)
    routings = [
        route_on_device(ids, range(2, 7), num_experts=8, alignment=alignment, rows=given)
        for given in (None, (x_ND, rows))
    ]
    plain, found = ([it.permuted_idx_NK, it.starts_e, it.ends_e, it.offs_e] for it in routings)
    assert all(map(torch.equal, plain, found))
    expected = quantise_rows(x_ND)
    assert torch.equal(rows.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(rows.scales, expected.scales)


@pytest.mark.parametrize(
    ("shape", "alignment", "dtype", "strided"),
    in_turn(
        2, [(shape,) for shape in SHAPES], [1, 128], [(torch.int32, False), (torch.int64, True)]
    ),
    ids=str,
)
def test_routes_like_the_cpu(shape, alignment: int, dtype: torch.dtype, strided: bool):
    topk_idx_NK, (num_rows, top_k, num_experts, experts) = draw(shape, dtype), shape
    expected = route(topk_idx_NK, expert_bounds(experts, "cpu", dtype))
    ids = topk_idx_NK.to(DEVICE)
    if strided:
        ids = torch.nn.functional.pad(ids, (3, 2), value=0)[:, 3 : 3 + top_k]
    routing = route_on_device(ids, experts, num_experts=num_experts, alignment=alignment)
    assert routing.offs_e.tolist() == expected.offs_e.tolist()
    assert routing.offs_e.dtype == torch.int32
    starts, ends = routing.starts_e.tolist(), routing.ends_e.tolist()
    assert all(start % alignment == 0 for start in starts) and starts == sorted(starts)
    assert max(ends, default=0) <= routing.num_permuted
    assert routing.num_permuted == max_permuted(num_rows, top_k, len(experts), alignment)
    places = [place for start, end in zip(starts, ends, strict=True) for place in range(start, end)]
    assert routing.row_R.cpu()[places].tolist() == expected.row_R.tolist()
    place_P = torch.full((num_rows * top_k,), -1, dtype=torch.int32)
    place_P[expected.pair_R] = torch.tensor(places, dtype=torch.int32)
    assert torch.equal(routing.permuted_idx_NK.cpu().reshape(-1), place_P)


def test_scan_counts_of_many_chunks():
    """More than a program takes at a time."""
    counts = torch.randint(0, 129, (2501, 32), dtype=torch.int32)
    found = counts.to(DEVICE, copy=True)
    scan_counts(found)
    expected = torch.cat((torch.zeros(1, 32, dtype=torch.int64), counts[:-1].cumsum(0)))
    assert torch.equal(found.cpu().long(), expected)


def test_places_suffice_for_the_worst_routing():
    for num_rows, top_k, num_local, alignment in [(5, 8, 4, 1), (300, 2, 5, 128), (1, 8, 32, 128)]:
        experts = range(num_local)
        for ids in (torch.arange(top_k), torch.arange(top_k).flip(0), torch.arange(top_k) + 1):
            topk_idx_NK = (
                ids.where(ids < num_local, -1).expand(num_rows, -1).contiguous().to(DEVICE)
            )
            routing = route_on_device(topk_idx_NK, experts, num_experts=9, alignment=alignment)
            assert int(routing.ends_e.max()) <= routing.num_permuted


@pytest.mark.parametrize(
    ("shape", "dtype", "width"),
    in_turn(
        3,
        [(shape,) for shape in THERE_AND_BACK],
        [
            *((torch.float32, width) for width in (8, 5000)),
            *((torch.bfloat16, width) for width in (200, 2048)),
            (torch.float16, 2048),
        ],
    ),
    ids=str,
)
def test_rows_go_there_and_back(shape, dtype: torch.dtype, width: int):
    topk_idx_NK, (num_rows, top_k, num_experts, experts) = draw(shape), shape
    generator = torch.Generator().manual_seed(3)
    weights_NK = torch.rand(num_rows, top_k, generator=generator)
    wide_ND = torch.randn(num_rows, width + 8, generator=generator).to(dtype)
    x_ND = wide_ND[:, :width]
    routing = route_on_device(topk_idx_NK.to(DEVICE), experts, num_experts=num_experts, alignment=8)
    x_RD = ExpertInput(wide_ND.to(DEVICE)[:, :width], routing.offs_e, None, routing).permuted_rows()
    assert x_RD.shape == (routing.num_permuted, width)
    used = torch.zeros(routing.num_permuted, dtype=torch.bool)
    for start, end in zip(routing.starts_e.tolist(), routing.ends_e.tolist(), strict=True):
        used[start:end] = True
    assert torch.equal(x_RD.cpu()[used], x_ND[routing.row_R.cpu()[used].long()])
    # What lies at unused places must not reach any sum.
    y_RD = torch.full_like(x_RD, float("nan"))
    y_RD[used.to(DEVICE)] = x_RD[used.to(DEVICE)] * 2
    out_ND = weighted_sum(y_RD, routing, weights_NK.to(DEVICE))
    local = (topk_idx_NK >= experts.start) & (topk_idx_NK < experts.stop)
    expected_ND = 2 * x_ND.float() * (weights_NK * local).sum(1, keepdim=True)
    assert out_ND.dtype == dtype and out_ND.shape == x_ND.shape
    torch.testing.assert_close(out_ND.cpu().float(), expected_ND, atol=2e-2, rtol=2e-2)
    kept_ND, first, end = torch.zeros_like(out_ND), num_rows // 3, num_rows // 2
    kept = first, end, kept_ND
    again_ND = kernel.weighted_sum(y_RD, routing.permuted_idx_NK, weights_NK.to(DEVICE), kept)
    again_ND[first:end] = kept_ND[first:end]
    assert torch.equal(out_ND, again_ND) and not kept_ND[:first].any() and not kept_ND[end:].any()


def test_sixteen_bit_sums_accumulate_in_float32():
    routing = route_on_device(torch.tensor([[0, 1, 2]]).to(DEVICE), range(3), num_experts=3)
    y_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16).to(DEVICE)
    assert weighted_sum(y_RD, routing, torch.ones(1, 3).to(DEVICE)).item() == 258
