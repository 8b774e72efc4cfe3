"""Rows to expert order and back on a GPU: what the CPU's routing says, without ever waiting for the device."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.device_routing import max_places, route_on_device
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.permute import ExpertOrder, expert_bounds, route, weighted_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# rows, top-k, experts, local experts; 700 x 8 pairs need the counting launch, the last several chunks of it
SHAPES = [
    (1, 8, 128, range(32)),
    (7, 3, 8, range(2, 6)),
    (5, 2, 3, range(1, 1)),
    (0, 4, 16, range(16)),
    (512, 8, 128, range(96, 128)),
    (700, 8, 128, range(32, 64)),
    (3, 1, 1, range(1)),
    (9000, 8, 256, range(256)),
]


def draw(shape, dtype=torch.int64) -> torch.Tensor:
    """topk_idx_NK on the CPU, some of them -1."""
    num_rows, top_k, num_experts, _ = shape
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    topk_idx_NK = scores.topk(top_k, dim=-1).indices.to(dtype)
    topk_idx_NK[num_rows // 2 : num_rows // 2 + 2] = -1
    topk_idx_NK[: num_rows // 3, 0] = -1
    return topk_idx_NK


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routes_like_the_cpu(shape, alignment: int, dtype: torch.dtype, strided: bool):
    topk_idx_NK, (num_rows, top_k, num_experts, experts) = draw(shape, dtype), shape
    expected = route(topk_idx_NK, expert_bounds(experts, "cpu", dtype))
    ids = topk_idx_NK.cuda()
    if strided:
        ids = torch.nn.functional.pad(ids, (3, 2), value=0)[:, 3 : 3 + top_k]
    routing = route_on_device(ids, experts, num_experts=num_experts, alignment=alignment)
    assert routing.offs_e.tolist() == expected.offs_e.tolist()
    assert routing.offs_e.dtype == torch.int32
    starts, ends = routing.starts_e.tolist(), routing.ends_e.tolist()
    assert all(start % alignment == 0 for start in starts) and starts == sorted(starts)
    assert max(ends, default=0) <= routing.num_places
    assert routing.num_places == max_places(num_rows, top_k, len(experts), alignment)
    places = [place for start, end in zip(starts, ends, strict=True) for place in range(start, end)]
    assert routing.row_R.cpu()[places].tolist() == expected.row_R.tolist()
    place_P = torch.full((num_rows * top_k,), -1, dtype=torch.int32)
    place_P[expected.pair_R] = torch.tensor(places, dtype=torch.int32)
    assert torch.equal(routing.place_NK.cpu().reshape(-1), place_P)


def test_places_suffice_for_the_worst_routing():
    for num_rows, top_k, num_local, alignment in [(5, 8, 4, 1), (300, 2, 5, 128), (1, 8, 32, 128)]:
        experts = range(num_local)
        for ids in (torch.arange(top_k), torch.arange(top_k).flip(0), torch.arange(top_k) + 1):
            topk_idx_NK = ids.where(ids < num_local, -1).expand(num_rows, -1).contiguous().cuda()
            routing = route_on_device(topk_idx_NK, experts, num_experts=9, alignment=alignment)
            assert int(routing.ends_e.max()) <= routing.num_places


@pytest.mark.parametrize("width", [8, 200, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_rows_go_there_and_back(shape, dtype: torch.dtype, width: int):
    topk_idx_NK, (num_rows, top_k, num_experts, experts) = draw(shape), shape
    generator = torch.Generator().manual_seed(3)
    weights_NK = torch.rand(num_rows, top_k, generator=generator)
    wide_ND = torch.randn(num_rows, width + 8, generator=generator).to(dtype)
    x_ND = wide_ND[:, :width]
    routing = route_on_device(topk_idx_NK.cuda(), experts, num_experts=num_experts, alignment=8)
    x_RD = ExpertInput(wide_ND.cuda()[:, :width], routing.offs_e, None, routing).in_order()
    assert x_RD.shape == (routing.num_places, width)
    used = torch.zeros(routing.num_places, dtype=torch.bool)
    for start, end in zip(routing.starts_e.tolist(), routing.ends_e.tolist(), strict=True):
        used[start:end] = True
    assert torch.equal(x_RD.cpu()[used], x_ND[routing.row_R.cpu()[used].long()])
    # What lies at unused places must not reach any sum.
    y_RD = torch.full_like(x_RD, float("nan"))
    y_RD[used.cuda()] = x_RD[used.cuda()] * 2
    out_ND = weighted_sum(y_RD, routing, weights_NK.cuda())
    local = (topk_idx_NK >= experts.start) & (topk_idx_NK < experts.stop)
    expected_ND = 2 * x_ND.float() * (weights_NK * local).sum(1, keepdim=True)
    assert out_ND.dtype == dtype and out_ND.shape == x_ND.shape
    torch.testing.assert_close(out_ND.cpu().float(), expected_ND, atol=2e-2, rtol=2e-2)
    assert torch.equal(out_ND, weighted_sum(y_RD, routing, weights_NK.cuda()))


def test_sixteen_bit_sums_accumulate_in_float32():
    routing = route_on_device(torch.tensor([[0, 1, 2]]).cuda(), range(3), num_experts=3)
    y_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16).cuda()
    assert weighted_sum(y_RD, routing, torch.ones(1, 3).cuda()).item() == 258


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@torch.inference_mode()
def test_rows_gathered_over_nccl_capture_into_a_graph(group):
    """Views of packed rows: ids, weights and x with strides of whole rows."""
    shape = (96, 8, 128, range(32, 64))
    order = ExpertOrder(shape[3], num_experts=128, device="cuda")
    exchange = AllGatherAllToAll(group, order, RowFormat(256, 8, torch.bfloat16))
    gemm, new = TritonGroupedGemm(), {"device": "cuda", "dtype": torch.bfloat16}
    w13, w2 = torch.randn(32, 256, 256, **new) / 16, torch.randn(32, 256, 128, **new) / 11
    x_TD, weights_TK = torch.randn(96, 256, **new), torch.rand(96, 8, device="cuda")
    topk_idx_TK = draw(shape).cuda()

    def layer() -> torch.Tensor:
        routed = exchange.dispatch(x_TD, topk_idx_TK, weights_TK).wait()
        return exchange.combine(gemm(routed, w13, w2), routed.handle).wait()

    expected_TD = torch.zeros(96, 256, device="cuda")
    for local, expert in enumerate(shape[3]):
        row, k = (topk_idx_TK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TD[row].float(), w13[local].float()).chunk(2, -1)
        y_RD = F.linear(F.silu(gate) * up, w2[local].float())
        expected_TD.index_add_(0, row, y_RD * weights_TK[row, k].unsqueeze(1))
    eager_TD = layer()
    torch.testing.assert_close(eager_TD.float(), expected_TD, atol=3e-2, rtol=3e-2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = layer()
    out_TD.zero_()
    graph.replay()
    assert torch.equal(out_TD, eager_TD)
