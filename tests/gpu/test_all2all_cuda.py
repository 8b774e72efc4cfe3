"""Every exchange on GPUs, a rank each: the contract, graphs, streams, SMs, and many random rounds.

The checks replace the experts by something whose sum is known: expert e multiplies a row by (e + 1) / E.
"""

import os
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from kernels.all2all.base import AllToAll, sum_partials
from kernels.all2all.comm_stream import CommStream, comm_streams
from kernels.all2all.copy_engine import KERNEL_ROWS, CopyEngineAllToAll
from kernels.backends import select
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.context import BackendContext
from kernels.routing.expert_map import ContiguousMap
from tests.devices import SHARED, most_ranks, take_gpu
from tests.distributed.rank_pool import GroupInfo, RankPool
from tests.distributed.test_all2all import CASES, run_cases
from tests.distributed.test_fp8_rows import run_rows
from tests.gpu.pools import Pools

MAX_RANKS = most_ranks(4)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MAX_RANKS < 2, reason="needs two GPUs"),
]
NAMES = ["torch_dist", "allgather", "symm", "copy_engine", "copies"]
HIDDEN, NUM_EXPERTS, TOP_K, MAX_TOKENS = 256, 16, 4, KERNEL_ROWS + 64
ROUNDS = 1000

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def skip_unavailable(name: str) -> None:
    name = "copy_engine" if name == "copies" else name
    if reason := select.probe("cuda").get(f"all2all.{name}"):
        pytest.skip(reason)


def build(name: str, rank: int, num_ranks: int) -> AllToAll:
    """`copies` is `copy_engine` that always copies."""
    wanted = "copy_engine" if name == "copies" else name
    shape = BackendShape(
        device="cuda",
        dtype=torch.bfloat16,
        num_ranks=num_ranks,
        hidden_size=HIDDEN,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        max_num_tokens=MAX_TOKENS,
        attention_specs=(AttentionSpec(1, 1, 8, 1.0),),
    )
    config = KernelsConfig(all2all=wanted, grouped_gemm="triton")
    selection = select.select(config, select.probe("cuda"), shape)
    context = BackendContext(
        shape=shape,
        device=torch.device("cuda", torch.cuda.current_device()),
        rank=rank,
        group=dist.group.WORLD,
        shared_memory=None,
        expert_map=ContiguousMap(NUM_EXPERTS, num_ranks),
        block_size=4,
    )
    all2all = select.build(selection, context).all2all
    if isinstance(all2all, CopyEngineAllToAll) and name == "copies":
        all2all.stream, all2all.kernel_rows = CommStream(priority=-1), -1
    return all2all


def draw(num_tokens: int, generator: torch.Generator, *, crowded: bool = False) -> Inputs:
    """Rows with different experts each, a tenth of them absent; `crowded`: the first ones only."""
    new = {"device": "cuda", "generator": generator}
    x_TD = torch.randn(num_tokens, HIDDEN, **new).bfloat16()
    scores = torch.rand(num_tokens, NUM_EXPERTS, **new)
    if crowded:
        scores[:, TOP_K:] = -1
    topk_idx_TK = scores.topk(TOP_K, dim=-1).indices
    absent_TK = torch.rand(num_tokens, TOP_K, **new) < 0.1
    weights_TK = torch.rand(num_tokens, TOP_K, **new)
    return x_TD, topk_idx_TK.masked_fill(absent_TK, -1), weights_TK


def expected(inputs: Inputs) -> torch.Tensor:
    x_TD, topk_idx_TK, weights_TK = inputs
    return x_TD.float() * (weights_TK * (topk_idx_TK + 1) / NUM_EXPERTS).sum(1, keepdim=True)


def experts_of(routed, first_expert: int) -> torch.Tensor:
    """What the experts make of the rows; no wait for the device."""
    rows_RD = routed.permuted_rows()
    places_R = torch.arange(rows_RD.shape[0], dtype=torch.int32, device="cuda")
    expert_R = torch.searchsorted(routed.device_routing().ends_e, places_R, right=True)
    scale_R1 = ((first_expert + expert_R + 1) / NUM_EXPERTS).unsqueeze(1)
    return (rows_RD.float().nan_to_num() * scale_R1).bfloat16()


def exchange(all2all: AllToAll, inputs: Inputs) -> torch.Tensor:
    x_TD, *chosen = inputs
    room = all2all.dispatch_buffer(len(x_TD))
    routed = all2all.dispatch(x_TD if room is None else room.copy_(x_TD), *chosen).wait()
    y_RD = experts_of(routed, first_expert())
    return sum_partials(all2all.combine(y_RD, routed.handle).wait())


def first_expert() -> int:
    expert_map = ContiguousMap(NUM_EXPERTS, dist.get_world_size())
    return expert_map.slots_of(dist.get_rank()).start


def error_of(out_TD: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The largest error, relative above 1; a tensor, so that nobody waits."""
    wanted_TD = expected(inputs)
    return ((out_TD.float() - wanted_TD).abs() / (1 + wanted_TD.abs())).amax()


def check_random_rounds(all2all: AllToAll, rank: int) -> None:
    """Any number of rows, one expert's and everybody's, against the known sum."""
    same, own = torch.Generator().manual_seed(7), torch.Generator("cuda").manual_seed(rank)
    worst = torch.zeros((), device="cuda")
    for index in range(ROUNDS):
        num_tokens = int(torch.randint(0, MAX_TOKENS if index % 8 == 0 else 40, (), generator=same))
        if not all2all.needs_equal_tokens:
            num_tokens = (num_tokens + 5 * rank) % MAX_TOKENS
        inputs = draw(num_tokens, own, crowded=index % 5 == 0)
        out_TD = exchange(all2all, inputs)
        assert out_TD.shape == (num_tokens, HIDDEN)
        if num_tokens:
            worst = torch.maximum(worst, error_of(out_TD, inputs))
    assert worst.item() < 2e-2, worst.item()


def check_no_wait_on_the_host(all2all: AllToAll, rank: int) -> None:
    inputs = draw(24, torch.Generator("cuda").manual_seed(rank))
    exchange(all2all, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out_TD = exchange(all2all, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert error_of(out_TD, inputs).item() < 2e-2


def check_graph(all2all: AllToAll, rank: int, num_tokens: int) -> None:
    """An odd number of exchanges in a graph, replayed on new inputs between eager ones: bit-equal."""
    generator = torch.Generator("cuda").manual_seed(rank)
    static = draw(num_tokens, generator)
    exchange(all2all, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [exchange(all2all, static) for _ in range(3)]
    for index in range(6):
        inputs = draw(num_tokens, generator, crowded=index % 2 == 1)
        for old, new in zip(static, inputs, strict=True):
            old.copy_(new)
        graph.replay()
        eager_TD = exchange(all2all, inputs)
        assert all(torch.equal(out_TD, eager_TD) for out_TD in outs)
        assert error_of(eager_TD, inputs).item() < 2e-2


def check_two_instances(all2all: AllToAll, name: str, rank: int, num_ranks: int) -> None:
    """Two ubatches' exchanges on streams beside the current one, interleaved as ubatches are."""
    before, device = all2all.stream, torch.device("cuda", torch.cuda.current_device())
    ubatches = [all2all, build(name, rank, num_ranks)]
    generator = torch.Generator("cuda").manual_seed(rank)
    for one, stream in zip(ubatches, comm_streams(device, 2), strict=True):
        one.stream = stream
    worst = torch.zeros((), device="cuda")
    for index in range(60):
        drawn = [draw(8 + index % 3 * KERNEL_ROWS // 2, generator) for _ in ubatches]
        sent = [one.dispatch(*inputs) for one, inputs in zip(ubatches, drawn, strict=True)]
        returned = []
        for one, pending in zip(ubatches, sent, strict=True):
            routed = pending.wait()
            y_RD = experts_of(routed, first_expert())
            returned.append(one.combine(y_RD, routed.handle))
            del routed, y_RD
        for inputs, pending in zip(drawn, returned, strict=True):
            worst = torch.maximum(worst, error_of(sum_partials(pending.wait()), inputs))
    assert worst.item() < 2e-2, worst.item()
    all2all.stream = before
    ubatches[1].close()


def check_num_sms(all2all: AllToAll, rank: int) -> None:
    for num_tokens in (3, KERNEL_ROWS):
        inputs = draw(num_tokens, torch.Generator("cuda").manual_seed(rank))
        wanted_TD = exchange(all2all, inputs)
        for num_sms in (4, 8, 16, 20, 24, None):
            all2all.set_num_sms(num_sms)
            assert torch.equal(exchange(all2all, inputs), wanted_TD), num_sms


def check_no_kernel_moves_rows(all2all: AllToAll, rank: int) -> None:
    """On the exchange's stream the profiler sees copies between GPUs and nothing else."""
    inputs = draw(MAX_TOKENS, torch.Generator("cuda").manual_seed(rank))
    exchange(all2all, inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        exchange(all2all, inputs)
        torch.cuda.synchronize()
    on_stream = defaultdict(list)
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            on_stream[event.device_resource_id()].append(event.name())
    copies = [names for names in on_stream.values() if any("PtoP" in name for name in names)]
    assert len(copies) == 1 and len(copies[0]) == 2 * (dist.get_world_size() - 1), on_stream
    assert all(name.startswith("Memcpy PtoP") for name in copies[0]), copies


def check_exchange(rank: int, num_ranks: int, info: GroupInfo, name: str) -> None:
    """All checks of one backend, in one rank's process."""
    take_gpu(rank)
    all2all = build(name, rank, num_ranks)
    check_random_rounds(all2all, rank)
    check_two_instances(all2all, name, rank, num_ranks)
    check_num_sms(all2all, rank)
    if all2all.graph:
        check_no_wait_on_the_host(all2all, rank)
        for num_tokens in (5, MAX_TOKENS):
            check_graph(all2all, rank, num_tokens)
    if name == "copies" and not SHARED:  # else some of the copies stay in their GPU
        check_no_kernel_moves_rows(all2all, rank)
    all2all.close()


def check_one_visible_gpu(rank: int, num_ranks: int, info: GroupInfo, name: str) -> None:
    """As Ray's actors are: each process sees one GPU, and all call it device 0."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    assert torch.cuda.device_count() == 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(info.store_path, num_ranks),
        rank=rank,
        world_size=num_ranks,
        device_id=torch.device("cuda", 0),
    )
    try:
        all2all = build(name, rank, num_ranks)
        for num_tokens in (5, MAX_TOKENS):
            inputs = draw(num_tokens, torch.Generator("cuda").manual_seed(rank))
            assert error_of(exchange(all2all, inputs), inputs).item() < 2e-2
        all2all.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_contract(pools: Pools, name: str):
    skip_unavailable(name)
    for num_ranks in range(2, MAX_RANKS + 1):
        cases = {label: case for label, case in CASES.items() if len(case.tokens) == num_ranks}
        half = {label: replace(case, dtype=torch.bfloat16) for label, case in cases.items()}
        for gemm, drawn in (("reference", cases), ("triton", cases), ("torch_grouped", half)):
            args = (name, gemm, drawn, "cuda")
            pools.run(run_cases, num_ranks, *args, backend="nccl", timeout_s=150)


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_fp8(pools: Pools, name: str):
    skip_unavailable(name)
    pools.run(run_rows, 2, name, torch.bfloat16, "cuda", backend="nccl", timeout_s=150)


@pytest.mark.parametrize("name", NAMES)
def test_exchange(pools: Pools, name: str):
    skip_unavailable(name)
    for num_ranks in {2, MAX_RANKS}:
        pools.run(check_exchange, num_ranks, name, backend="nccl", timeout_s=150)


@pytest.mark.parametrize("name", ["symm", "copies"])
def test_ranks_that_see_one_gpu_each(name: str):
    skip_unavailable(name)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    fresh = RankPool(2)  # CUDA reads which GPUs are visible once
    try:
        fresh.run(check_one_visible_gpu, 2, name, with_group=False, timeout_s=90)
    finally:
        fresh.close()
