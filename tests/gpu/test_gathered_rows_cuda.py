"""Rows that travelled packed over NCCL, their experts and their sums: eager and in a CUDA graph."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.payload import RowFormat
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.routing.permute import Permutation
from tests.triton.test_permute import draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


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
    order = Permutation(shape[3], num_experts=128, device="cuda")
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
