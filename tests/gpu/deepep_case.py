"""Two ranks, a GPU each, and one layer of experts between them: what the tests of DeepEP's exchanges share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from kernels.backends import select
from kernels.block_fp8 import quantise_blocks
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.context import BackendContext
from kernels.routing.expert_map import ContiguousMap
from tests.closeness import calc_diff

HIDDEN, WIDTH, ROOM = 2048, 256, 256

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Rows of each of two ranks, and how their experts are drawn."""

    tokens: tuple[int, int]
    routing: str = "random"
    num_experts: int = 16
    top_k: int = 4

    def draw(self, rank: int, slot: int) -> Inputs:
        """x_TD, topk_idx_TK, topk_weights_TK; the same wherever it is drawn."""
        generator = torch.Generator().manual_seed(1000 * slot + rank)
        count, local = self.tokens[rank], self.num_experts // 2
        x_TD = torch.randn(count, HIDDEN, generator=generator).bfloat16()
        scores = torch.rand(count, self.num_experts, generator=generator)
        ids_TK = scores.topk(self.top_k, dim=-1).indices
        if self.routing == "one":
            ids_TK = torch.full_like(ids_TK, -1)
            ids_TK[:, 1] = self.num_experts - 1
        elif self.routing == "same_rank":
            ids_TK = torch.arange(count)[:, None] % 2 * local + torch.arange(self.top_k)
        elif self.routing == "padding":
            ids_TK[count // 2 :] = -1
            ids_TK[: count // 4, 1] = -1
        elif (self.routing == "idle_rank" and rank == 1) or self.routing == "nobody":
            ids_TK = torch.full_like(ids_TK, -1)
        weights_TK = torch.rand(count, self.top_k, generator=generator)
        return x_TD.cuda(), ids_TK.cuda(), weights_TK.cuda()

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        w13 = torch.randn(self.num_experts, 2 * WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        w2 = torch.randn(self.num_experts, HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        return w13.bfloat16().cuda(), w2.bfloat16().cuda()


EQUAL = {
    "even": Case((64, 64)),
    "odd": Case((37, 37)),
    "one_row": Case((1, 1)),
    "none": Case((0, 0)),
    "many": Case((255, 255), num_experts=128, top_k=8),
    "one_expert_takes_all": Case((33, 33), "one"),
    "all_of_a_token_on_one_rank": Case((50, 50), "same_rank"),
    "padding": Case((48, 48), "padding"),
    "idle_rank": Case((16, 16), "idle_rank"),
    "only_padding": Case((8, 8), "nobody"),
    "top_1": Case((29, 29), top_k=1),
}
UNEVEN = {"uneven": Case((100, 7)), "zero_on_a_rank": Case((0, 61)), "full": Case((ROOM, 3))}


def dense(inputs: Inputs, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Each expert's MLP over its rows in float32."""
    x_TD, ids_TK, weights_TK = inputs
    out_TD = torch.zeros(x_TD.shape, device="cuda")
    for expert in range(len(w13)):
        row, k = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TD[row].float(), w13[expert].float()).chunk(2, -1)
        y_RD = F.linear(F.silu(gate) * up, w2[expert].float())
        out_TD.index_add_(0, row, y_RD * weights_TK[row, k].unsqueeze(1))
    return out_TD


def build(name: str, gemm: str, case: Case, rank: int) -> select.Backends:
    """As a rank of the engine does."""
    torch.cuda.set_device(rank)
    shape = BackendShape(
        device="cuda",
        dtype=torch.bfloat16,
        num_ranks=2,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=case.num_experts,
        top_k=case.top_k,
        max_num_tokens=ROOM,
        attention_specs=(AttentionSpec(1, 1, 8, 1.0),),
    )
    selection = select.select(
        KernelsConfig(all2all=name, grouped_gemm=gemm, attention="sdpa"),  # type: ignore[arg-type]
        select.probe("cuda"),
        shape,
    )
    context = BackendContext(
        shape=shape,
        device=torch.device("cuda", rank),
        rank=rank,
        group=torch.distributed.group.WORLD,
        shared_memory=None,
        expert_map=ContiguousMap(case.num_experts, 2),
        block_size=4,
    )
    return select.build(selection, context)


class Layer:
    """Dispatch, the experts of this rank, combine."""

    def __init__(self, name: str, gemm: str, case: Case, rank: int, product: Any = None):
        backends = build(name, gemm, case, rank)
        self.all2all, self.gemm, self.case, self.rank = (
            backends.all2all,
            backends.grouped_gemm,
            case,
            rank,
        )
        local = case.num_experts // 2
        self.everybodys = case.weights()
        self.prepared = tuple(w[rank * local : (rank + 1) * local] for w in self.everybodys)
        if product is not None:
            self.gemm = product
        if self.gemm.fp8_weights:
            self.prepared = tuple(quantise_blocks(w) for w in self.prepared)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        routed = self.all2all.dispatch(*inputs).wait()
        return self.all2all.combine(self.gemm(routed, *self.prepared), routed.handle).wait()

    def check(self, slot: int, out_TD: torch.Tensor, most: float) -> None:
        expected_TD = dense(self.case.draw(self.rank, slot), *self.everybodys)
        assert out_TD.shape == expected_TD.shape and out_TD.dtype == torch.bfloat16
        assert not out_TD.isnan().any()
        assert calc_diff(out_TD, expected_TD) < most, calc_diff(out_TD, expected_TD)


def in_graph(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out
