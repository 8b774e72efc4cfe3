"""Rows that travel in FP8, for every all-to-all that sends them so: what arrives is what rounding on arrival gives."""

from dataclasses import replace

import pytest
import torch

from kernels import dense_fp8
from kernels.all2all.base import AllToAll, ExpertInput, sum_partials
from kernels.all2all.comm_stream import CommStream
from kernels.backends import select
from kernels.block_fp8 import quantise_groups
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.interface.registry import ALL2ALL, backend_class
from kernels.routing.expert_map import ContiguousMap
from tests.devices import take_gpu
from tests.distributed.rank_pool import GroupInfo, RankPool

HIDDEN, TOP_K, NUM_EXPERTS, MAX_TOKENS = 384, 3, 7, 40


def build(
    name: str, dtype: torch.dtype, rank: int, num_ranks: int, device: torch.device
) -> AllToAll:
    """The all-to-all of a rank. `copies` is `copy_engine` that always copies."""
    found: type[AllToAll] = backend_class("all2all", "copy_engine" if name == "copies" else name)
    assert found.fp8_rows
    shape = BackendShape(
        device=device.type,
        dtype=dtype,
        num_ranks=num_ranks,
        hidden_size=HIDDEN,
        moe_intermediate_size=128,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        max_num_tokens=MAX_TOKENS,
        fp8_rows=True,
    )
    context = BackendContext(
        shape=shape,
        device=device,
        rank=rank,
        group=torch.distributed.group.WORLD,
        shared_memory=None,
        expert_map=ContiguousMap(NUM_EXPERTS, num_ranks),
        block_size=4,
    )
    all2all = found.build(context)
    if name == "copies":
        all2all.stream, all2all.kernel_rows = CommStream(device), -1  # type: ignore[attr-defined]
    return all2all


def draw(num_tokens: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x whose groups differ in size, topk_idx with some of -1, topk_weights."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_tokens, HIDDEN, generator=generator)
    x_TD *= 1 + torch.arange(HIDDEN) // 128
    ids_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    ids_TK[1::4, 0] = -1
    ids_TK[3::4] = -1
    return x_TD.to(dtype), ids_TK, torch.rand(num_tokens, TOP_K, generator=generator)


def answer(routed: ExpertInput, experts: range, dtype: torch.dtype) -> torch.Tensor:
    """Expert e gives (e + 1) times the row."""
    assert routed.x_RD.dtype == torch.float8_e4m3fn and routed.scale_RS is not None
    x_RD = routed.x_RD.float() * routed.scale_RS.repeat_interleave(128, 1)
    if routed.routing is None:
        ends = routed.offs_e.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        factors = (
            torch.tensor(experts).repeat_interleave(torch.tensor(sizes, dtype=torch.int64)) + 1
        )
        return (x_RD * factors[:, None]).to(dtype)
    routing = routed.routing
    y_RD = x_RD.new_full((routing.num_permuted, HIDDEN), float("nan"))
    for expert, start, end in zip(experts, routing.starts_e, routing.ends_e, strict=True):
        y_RD[start:end] = x_RD[routing.row_R[start:end].long()] * (expert + 1)
    return y_RD.to(dtype)


def run_rows(
    rank: int,
    num_ranks: int,
    info: GroupInfo,
    name: str,
    dtype: torch.dtype,
    device_type: str = "cpu",
) -> None:
    """Exchanges of several sizes in one rank's process; also run by the GPU tests."""
    device = take_gpu(rank) if device_type == "cuda" else torch.device("cpu")
    all2all = build(name, dtype, rank, num_ranks, device)
    experts = ContiguousMap(NUM_EXPERTS, num_ranks).slots_of(rank)
    try:
        for call, num_tokens in enumerate((5, 0, MAX_TOKENS, 1)):
            rows = num_tokens if all2all.needs_equal_tokens else max(0, num_tokens - rank)
            x_TD, ids_TK, weights_TK = draw(rows, 10 * call + rank, dtype)
            sent = (tensor.to(device) for tensor in (x_TD, ids_TK, weights_TK))
            routed = all2all.dispatch(*sent).wait()
            y_RD = answer(routed, experts, dtype)
            out_TD = sum_partials(all2all.combine(y_RD, routed.handle).wait())
            assert out_TD.dtype == dtype and out_TD.device == device
            # Triton's division may round a scale differently from torch's.
            quantise = quantise_groups if device.type == "cpu" else dense_fp8.quantise
            values, scales = quantise(x_TD.to(device))
            rounded_TD = (values.float() * scales.repeat_interleave(128, 1)).cpu()
            expected = rounded_TD * (weights_TK * (ids_TK + 1)).sum(1, keepdim=True)
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(
                out_TD.float().cpu(), expected, atol=tolerance * 10, rtol=tolerance
            )
    finally:
        all2all.close()


@pytest.mark.parametrize("name", ["torch_dist", "allgather"])
def test_rows_in_fp8(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(run_rows, 2, name, torch.float32)


def test_rows_are_in_fp8_where_both_sides_take_them() -> None:
    """Of the backends' classes; memory is counted with the format that they then use."""
    senders = {name for name in ALL2ALL if backend_class("all2all", name).fp8_rows}
    packages = {"deepep", "deepep_hosts"}
    assert senders == {"local", "torch_dist", "allgather", "symm", "copy_engine", *packages}
    for all2all, gemm, expected in (
        ("symm", "deepgemm_fp8", True),
        ("symm", "triton", False),
        ("deepep", "deepgemm_fp8", True),
        ("deepep_low_latency", "deepgemm_fp8", False),
    ):
        choices = [select.Choice(name, "") for name in (all2all, gemm, "triton")]
        assert select.Selection(*choices).fp8_rows == expected


def test_fewer_bytes_are_kept_for_them() -> None:
    from kernels.backends.memory import backend_memory

    shape = BackendShape(
        device="cuda",
        dtype=torch.bfloat16,
        num_ranks=2,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        max_num_tokens=100,
    )
    choices = [select.Choice(name, "") for name in ("symm", "deepgemm_fp8", "triton")]
    fp8 = select.Selection(*choices)
    plain = replace(fp8, grouped_gemm=select.Choice("triton", ""))
    saved = backend_memory(plain, shape).kept - backend_memory(fp8, shape).kept
    assert saved == 200 * (2048 - 4 * 16)
