"""The contract of every all-to-all, against one plain dense loop over experts."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.all2all.base import AllToAll, sum_partials
from kernels.all2all.comm_stream import CommStream
from kernels.backends import select
from kernels.host.links import HostNetwork
from kernels.host.shm import SharedMemoryGroup
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.context import BackendContext
from kernels.routing.expert_map import ContiguousMap
from tests.devices import take_gpu
from tests.distributed.rank_pool import GroupInfo, RankPool
from workers.parallel import ParallelDims

MAX_TOKENS = 64
HIDDEN, WIDTH = 32, 24


@dataclass(frozen=True)
class Case:
    """One exchange: `tokens` rows on each rank; `routing` says how their experts are drawn."""

    tokens: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 3
    routing: str = "random"
    dtype: torch.dtype = torch.float32
    in_flight: int = 1

    def equal(self) -> "Case":
        """The same with as many rows everywhere, for backends that need it; the rest is padding."""
        return replace(self, tokens=(max(self.tokens),) * len(self.tokens))


CASES = {
    "even": Case((5, 5)),
    "uneven": Case((7, 1, 13)),
    "zero_on_a_rank": Case((0, 6)),
    "zero_everywhere": Case((0, 0)),
    "one_expert_takes_all": Case((9, 4, 3), routing="one"),
    "all_of_a_token_on_one_rank": Case((6, 5), routing="same_rank"),
    "padding": Case((6, 9), routing="padding"),
    "only_padding": Case((4, 3), routing="nobody"),
    "experts_not_divisible": Case((5, 8, 2), num_experts=7),
    "more_ranks_than_experts": Case((3, 4, 1, 6), num_experts=3, top_k=2),
    "top_1": Case((17, 11, 1, 5), top_k=1),
    "bfloat16": Case((11, 6), dtype=torch.bfloat16),
    "two_in_flight": Case((9, 4), in_flight=2),
    "five_in_flight": Case((6, 10, 1), in_flight=5),
    "full": Case((MAX_TOKENS, MAX_TOKENS)),
}


def _draw(case: Case, rank: int, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_TD, topk_idx_TK, topk_weights_TK of a rank; `slot` tells exchanges in flight apart."""
    generator = torch.Generator().manual_seed(1000 * slot + rank)
    num_tokens, num_experts, top_k = case.tokens[rank], case.num_experts, case.top_k
    x_TD = torch.randn(num_tokens, HIDDEN, generator=generator).to(case.dtype)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx_TK = scores.topk(top_k, dim=-1).indices
    if case.routing == "one":
        topk_idx_TK = torch.full_like(topk_idx_TK, -1)
        topk_idx_TK[:, 1] = num_experts - 1
    elif case.routing == "same_rank":
        topk_idx_TK = (torch.arange(num_tokens)[:, None] % 2) * 4 + torch.arange(top_k)
    elif case.routing == "padding":
        topk_idx_TK[num_tokens // 2 :] = -1
        topk_idx_TK[0, 1] = -1
    elif case.routing == "nobody":
        topk_idx_TK.fill_(-1)
    return x_TD, topk_idx_TK, weights_TK


def _weights(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    w13 = torch.randn(case.num_experts, 2 * WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(case.num_experts, HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
    return w13.to(case.dtype), w2.to(case.dtype)


def dense_reference(
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """Token by token, expert by expert, in float32."""
    out = torch.zeros(x_TD.shape)
    for t, (experts, weights) in enumerate(zip(topk_idx_TK.tolist(), topk_weights_TK, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            if expert >= 0:
                gate, up = (w13[expert].float() @ x_TD[t].float()).chunk(2)
                out[t] += weight * (w2[expert].float() @ (F.silu(gate) * up))
    return out


def _build(
    name: str,
    gemm: str,
    case: Case,
    rank: int,
    num_ranks: int,
    info: GroupInfo,
    device: torch.device,
    num_nodes: int = 1,
) -> tuple[select.Backends, SharedMemoryGroup | None]:
    """The backends of a rank. `copies` is `copy_engine` that always copies."""
    copies = name == "copies"
    name = "copy_engine" if copies else name
    shape = BackendShape(
        device=device.type,
        dtype=case.dtype,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=case.num_experts,
        top_k=case.top_k,
        max_num_tokens=MAX_TOKENS,
        attention_specs=(AttentionSpec(1, 1, 8, 1.0),),
    )
    config = KernelsConfig(all2all=name, grouped_gemm=gemm)
    selection = select.select(config, select.probe(device), shape)
    shared_memory = None
    if slots := selection.all2all_class.shared_memory_slots(shape):
        dims = ParallelDims(num_ranks=num_ranks, num_nodes=num_nodes)
        shared_memory = SharedMemoryGroup(
            f"{info.name}-{dims.node(rank)}",
            dims.local_rank(rank),
            dims.ranks_per_node,
            slot_bytes=slots,
            timeout_s=20,
        )
    context = BackendContext(
        shape=shape,
        device=device,
        rank=rank,
        group=torch.distributed.group.WORLD if num_ranks > 1 else None,
        shared_memory=shared_memory,
        network=HostNetwork(address="127.0.0.1", timeout_s=20, hang_timeout_s=20),
        gather=_gather_json,
        expert_map=ContiguousMap(case.num_experts, num_ranks),
        block_size=4,
    )
    backends = select.build(selection, context)
    if copies:
        backends.all2all.stream, backends.all2all.kernel_rows = CommStream(device), -1
    return backends, shared_memory


def _gather_json(value: Any) -> list[Any]:
    found = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, json.dumps(value))
    return [json.loads(text) for text in found]


def _check_contract(
    backends: select.Backends, case: Case, rank: int, num_ranks: int, device: torch.device
) -> None:
    """Every exchange of the case, `in_flight` at a time, twice over, against the reference."""
    all2all: AllToAll = backends.all2all
    if all2all.max_in_flight is not None:
        case = replace(case, in_flight=min(case.in_flight, all2all.max_in_flight))
    experts = ContiguousMap(case.num_experts, num_ranks).slots_of(rank)
    w13, w2 = _weights(case)
    local_w13, local_w2 = (
        w[experts.start : experts.stop].contiguous().to(device) for w in (w13, w2)
    )
    for first in (0, case.in_flight):
        drawn = [_draw(case, rank, first + i) for i in range(case.in_flight)]
        sent = [all2all.dispatch(*(x.to(device) for x in inputs)) for inputs in drawn]
        returned = []
        for pending in sent:
            routed = pending.wait()
            assert pending.wait() is routed
            assert routed.x_RD.dtype == case.dtype and routed.x_RD.shape[1] == HIDDEN
            assert routed.offs_e.dtype == torch.int32 and len(routed.offs_e) == len(experts)
            ends = routed.offs_e.tolist()
            assert ends == sorted(ends)
            if device.type == "cpu":
                assert (ends[-1:] or [0])[0] == routed.x_RD.shape[0]
            y_RD = backends.grouped_gemm(routed, local_w13, local_w2)
            returned.append(all2all.combine(y_RD, routed.handle))
        tolerance = 1e-5 if case.dtype == torch.float32 else 3e-2
        for inputs, pending in zip(drawn, returned, strict=True):
            out_TD = sum_partials(pending.wait())
            assert out_TD.dtype == case.dtype and out_TD.device == device
            expected_TD = dense_reference(*inputs, w13, w2)
            torch.testing.assert_close(
                out_TD.float().cpu(), expected_TD, atol=tolerance, rtol=tolerance
            )


def run_cases(
    rank: int,
    num_ranks: int,
    info: GroupInfo,
    name: str,
    gemm: str,
    cases: dict[str, Case],
    device_type: str = "cpu",
    num_nodes: int = 1,
) -> None:
    """The contract in one rank's process; also run by the GPU tests."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = take_gpu(rank)
    for label, case in cases.items():
        unique = replace(info, name=f"{info.name}-{label}")
        backends, shared_memory = _build(
            name, gemm, case, rank, num_ranks, unique, device, num_nodes
        )
        equal = backends.all2all.needs_equal_tokens
        try:
            _check_contract(backends, case.equal() if equal else case, rank, num_ranks, device)
        except Exception as error:
            raise AssertionError(f"case {label}") from error
        finally:
            backends.all2all.close()
            if shared_memory is not None:
                shared_memory.close()


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_nodes"),
    [
        *((name, ranks, 1) for name in ("torch_dist", "allgather", "shm") for ranks in (2, 3, 4)),
        *(("hierarchical", ranks, nodes) for ranks, nodes in ((2, 2), (3, 3), (4, 2), (4, 4))),
    ],
)
def test_contract(rank_pool: RankPool, name: str, num_ranks: int, num_nodes: int):
    if reason := select.probe("cpu").get(f"all2all.{name}"):
        pytest.skip(reason)
    cases = {label: case for label, case in CASES.items() if len(case.tokens) == num_ranks}
    assert len(cases) >= 2
    rank_pool.run(run_cases, num_ranks, name, "torch_grouped", cases, "cpu", num_nodes)


@pytest.mark.parametrize(
    ("label", "gemm"),
    [
        (label, gemm)
        for label, case in CASES.items()
        for gemm in ("reference", "torch_grouped", "native")
        if gemm != "native" or case.dtype == torch.float32
    ],
)
def test_contract_of_one_rank(label: str, gemm: str):
    case = replace(CASES[label], tokens=CASES[label].tokens[:1])
    run_cases(0, 1, GroupInfo("one", "", 20), "local", gemm, {label: case})
