"""The DeepEP exchanges over a `deep_ep` that runs on CPU: the contract, and how its buffers are used.

What the real kernels do with these calls is tested in tests/gpu.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from kernels.all2all import deepep_package
from kernels.all2all.base import MaskedInput
from kernels.all2all.deepep import DeepEpAllToAll
from kernels.all2all.deepep_limits import MAX_SMS
from kernels.all2all.deepep_low_latency import DeepEpLowLatencyAllToAll
from kernels.backends.select import Backends
from kernels.block_fp8 import quantise_groups
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.routing.permute import Permutation
from tests.distributed import deep_ep_fake, test_all2all
from tests.distributed.rank_pool import GroupInfo, RankPool
from tests.distributed.test_all2all import CASES, HIDDEN, MAX_TOKENS, Case

CPU = torch.device("cpu")
SIXTEEN_BIT = {
    label: replace(case, dtype=torch.bfloat16)
    for label, case in CASES.items()
    if case.num_experts % len(case.tokens) == 0
}


def normal(case: Case, num_ranks: int, hidden: int = HIDDEN, fp8: bool = False) -> DeepEpAllToAll:
    local_ids = range(case.num_experts // num_ranks)
    order = Permutation(local_ids, num_experts=case.num_experts, device="cpu", dtype=torch.int64)
    group = torch.distributed.group.WORLD
    assert group is not None
    return DeepEpAllToAll(
        group, order, num_experts=case.num_experts, hidden_size=hidden, fp8=fp8, device=CPU
    )


def low_latency(
    case: Case, hidden: int = HIDDEN, use_fp8: bool = False, max_num_tokens: int = MAX_TOKENS
) -> DeepEpLowLatencyAllToAll:
    group = torch.distributed.group.WORLD
    assert group is not None
    return DeepEpLowLatencyAllToAll(
        group,
        num_experts=case.num_experts,
        hidden_size=hidden,
        max_num_tokens=max_num_tokens,
        use_fp8=use_fp8,
        device=CPU,
    )


class MaskedReference(GroupedGemm):
    """Each expert's first rows, as many as it has; what lies beyond stays undefined."""

    name = "masked_reference"
    layouts = ("masked",)

    def __call__(self, expert_input: MaskedInput, w13_e2ID, w2_eDI) -> torch.Tensor:
        rows_eMD = expert_input.x_eMD
        y_eMD = torch.full_like(rows_eMD, torch.nan, dtype=torch.bfloat16)
        for local, count in enumerate(expert_input.counts_e.tolist()):
            x_MD = rows_eMD[local, :count].float()
            if expert_input.scale_eMS is not None:
                x_MD = x_MD * expert_input.scale_eMS[local, :count].repeat_interleave(128, 1)
            gate, up = F.linear(x_MD, w13_e2ID[local].float()).chunk(2, -1)
            y_eMD[local, :count] = F.linear(F.silu(gate) * up, w2_eDI[local].float()).bfloat16()
        return y_eMD


def run_normal(rank: int, num_ranks: int, info: GroupInfo, cases: dict[str, Case]) -> int:
    deep_ep_fake.install()
    for case in cases.values():
        all2all = normal(case, num_ranks)
        backends = Backends(all2all, ReferenceGroupedGemm(), None)  # type: ignore[arg-type]
        test_all2all._check_contract(backends, case.equal(), rank, num_ranks, CPU)
        all2all.close()
    return deep_ep_fake.FakeBuffer.alive


def run_low_latency(rank: int, num_ranks: int, info: GroupInfo, cases: dict[str, Case]) -> int:
    """Counts differ between ranks; each case twice over."""
    deep_ep_fake.install()
    for case in cases.values():
        all2all, gemm = low_latency(case), MaskedReference()
        for _ in range(2):
            check_low_latency(all2all, gemm, case, rank, num_ranks)
        all2all.close()
    return deep_ep_fake.FakeBuffer.alive


def check_low_latency(
    all2all: DeepEpLowLatencyAllToAll, gemm: GroupedGemm, case: Case, rank: int, num_ranks: int
) -> None:
    """All of the case's exchanges at once, so that sends must receive what is outstanding."""
    w13, w2 = test_all2all._weights(case)
    local = case.num_experts // num_ranks
    mine = slice(rank * local, (rank + 1) * local)
    drawn = [test_all2all._draw(case, rank, slot) for slot in range(case.in_flight)]
    sent = [all2all.dispatch(*inputs) for inputs in drawn]
    returned = []
    for slot, pending in enumerate(sent):
        masked = pending.wait()
        everybodys = [test_all2all._draw(case, other, slot)[1] for other in range(num_ranks)]
        ids_P = torch.cat([ids.flatten() for ids in everybodys])
        counts = [int((ids_P == expert).sum()) for expert in range(mine.start, mine.stop)]
        assert masked.counts_e.tolist() == counts
        assert masked.offs_e.tolist() == torch.tensor(counts).cumsum(0).tolist()
        assert masked.offs_e.dtype == torch.int32
        returned.append(all2all.combine(gemm(masked, w13[mine], w2[mine]), masked.handle))
    for inputs, pending in zip(drawn, returned, strict=True):
        expected_TD = test_all2all.dense_reference(*inputs, w13, w2)
        torch.testing.assert_close(pending.wait().float(), expected_TD, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_normal_mode_keeps_the_contract(rank_pool: RankPool, num_ranks: int):
    cases = {label: case for label, case in SIXTEEN_BIT.items() if len(case.tokens) == num_ranks}
    assert len(cases) >= 1
    assert rank_pool.run(run_normal, num_ranks, cases) == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_low_latency_keeps_the_contract(rank_pool: RankPool, num_ranks: int):
    cases = {label: case for label, case in SIXTEEN_BIT.items() if len(case.tokens) == num_ranks}
    assert rank_pool.run(run_low_latency, num_ranks, cases) == [0] * num_ranks


def run_normal_fp8(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """Rounded rows travel, sums do not: expert e gives (e + 1) times the row."""
    deep_ep_fake.install()
    hidden, local = 256, 4
    case = Case((6, 6), num_experts=local * num_ranks, top_k=2, dtype=torch.bfloat16)
    all2all = normal(case, num_ranks, hidden, fp8=True)
    generator = torch.Generator().manual_seed(rank)
    for num_tokens in (6, 0, 1):
        x_TD = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        ids_TK = torch.tensor([[0, 7], [4, -1], [3, 4], [-1, -1], [5, 6], [1, 2]])[:num_tokens]
        weights_TK = torch.rand(num_tokens, 2, generator=generator)
        routed = all2all.dispatch(x_TD, ids_TK, weights_TK).wait()
        assert routed.x_RD.dtype == torch.float8_e4m3fn and routed.scale_RS is not None
        y_RD = routed.x_RD.float() * routed.scale_RS.repeat_interleave(128, 1)
        for own, (start, end) in enumerate(pairwise([0, *routed.offs_e.tolist()])):
            y_RD[start:end] *= rank * local + own + 1
        out_TD = all2all.combine(y_RD.bfloat16(), routed.handle).wait()
        values_TD, scales_TS = quantise_groups(x_TD)
        rounded_TD = values_TD.float() * scales_TS.repeat_interleave(128, 1)
        factors_T = (weights_TK * (ids_TK + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(out_TD.float(), rounded_TD * factors_T, atol=0.1, rtol=0.02)
    all2all.close()


def test_normal_rows_in_fp8(rank_pool: RankPool):
    rank_pool.run(run_normal_fp8, 2)


def run_fp8(rank: int, num_ranks: int, info: GroupInfo) -> None:
    deep_ep_fake.install()
    hidden, local = 256, 4
    case = Case((5, 8), num_experts=local * num_ranks, top_k=2, dtype=torch.bfloat16)
    all2all = low_latency(case, hidden, use_fp8=True)
    generator = torch.Generator().manual_seed(1)  # the same rows everywhere
    x_TD = torch.randn(6, hidden, generator=generator).bfloat16()
    ids_TK = torch.tensor([[0, 7], [4, -1], [3, 4], [-1, -1], [5, 6], [1, 2]])
    masked = all2all.dispatch(x_TD, ids_TK, torch.ones(6, 2)).wait()
    assert masked.x_eMD.dtype == torch.float8_e4m3fn and masked.scale_eMS is not None
    assert masked.scale_eMS.stride(1) == 1  # an expert's rows lie together, as DeepGEMM wants
    for own, count in enumerate(masked.counts_e.tolist()):
        (row,) = [t for t, ids in enumerate(ids_TK.tolist()) if rank * local + own in ids][:1]
        assert count % num_ranks == 0
        scale = masked.scale_eMS[own, 0].repeat_interleave(128)
        received = masked.x_eMD[own, 0].float() * scale
        torch.testing.assert_close(received, x_TD[row].float(), atol=0.02, rtol=0.07)
    all2all.close()


def test_low_latency_rows_in_fp8(rank_pool: RankPool):
    rank_pool.run(run_fp8, 2)


def run_several_instances(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """Two ubatches of a step have an exchange each, and interleave them."""
    deep_ep_fake.install()
    case = replace(SIXTEEN_BIT["even"], in_flight=2)
    first, second = low_latency(case), low_latency(case, max_num_tokens=MAX_TOKENS // 2)
    gemm = MaskedReference()
    w13, w2 = test_all2all._weights(case)
    mine = slice(rank * 4, rank * 4 + 4)
    drawn = [test_all2all._draw(case, rank, slot) for slot in range(2)]
    pairs = list(zip((first, second), drawn, strict=True))
    sent = [all2all.dispatch(*inputs) for all2all, inputs in pairs]
    masked = [pending.wait() for pending in reversed(sent)][::-1]
    back = [
        all2all.combine(gemm(rows, w13[mine], w2[mine]), rows.handle)
        for all2all, rows in zip((first, second), masked, strict=True)
    ]
    for inputs, pending in zip(drawn, back, strict=True):
        expected_TD = test_all2all.dense_reference(*inputs, w13, w2)
        torch.testing.assert_close(pending.wait().float(), expected_TD, atol=3e-2, rtol=3e-2)
    first.close()
    assert deep_ep_fake.FakeBuffer.alive == 1
    check_low_latency(second, gemm, case, rank, num_ranks)
    second.close()
    assert deep_ep_fake.FakeBuffer.alive == 0
    keeps = low_latency(case)
    with pytest.raises(AssertionError, match=r"max_rows=64.*not for .*max_rows=68"):
        low_latency(case, max_num_tokens=MAX_TOKENS + 1)
    keeps.close()


def test_instances_of_a_process_share_the_low_latency_buffer(rank_pool: RankPool):
    rank_pool.run(run_several_instances, 2)


def run_num_sms(rank: int, num_ranks: int, info: GroupInfo) -> list[int]:
    deep_ep_fake.install()
    case = SIXTEEN_BIT["even"]
    all2all = normal(case, num_ranks)
    gemm = ReferenceGroupedGemm()
    w13, w2 = (w[rank * 4 : rank * 4 + 4] for w in test_all2all._weights(case))
    used = []
    for num_sms in (None, 4, 7, 1, 500):
        all2all.set_num_sms(num_sms)
        routed = all2all.dispatch(*test_all2all._draw(case, rank, 0)).wait()
        used.append(routed.handle.origin.combine_config.num_sms)
        all2all.set_num_sms(16)  # combine must go on with what its dispatch had
        all2all.combine(gemm(routed, w13, w2), routed.handle).wait()
    all2all.close()
    return used


def test_sms_are_even_limited_and_those_of_the_dispatch(rank_pool: RankPool):
    assert rank_pool.run(run_num_sms, 2) == [[MAX_SMS, 4, 6, 2, MAX_SMS]] * 2


def run_lonely_close(rank: int, num_ranks: int, info: GroupInfo) -> int:
    deep_ep_fake.install()
    all2all = normal(SIXTEEN_BIT["even"], num_ranks)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deepep_package, "CLOSE_TIMEOUT_S", 0.2)
            all2all.close()
    return deep_ep_fake.FakeBuffer.alive


def test_close_does_not_wait_for_a_dead_peer(rank_pool: RankPool):
    """DeepEP's own end is a barrier of the ranks: without the peer it is left to the process's end."""
    assert rank_pool.run(run_lonely_close, 2, timeout_s=30) == [1, 1]
