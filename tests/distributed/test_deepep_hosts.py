"""DeepEP between hosts over a `deep_ep` that runs on CPU: four ranks are two hosts with two GPUs each.

The fake refuses a wrong argument, dtype, shape or order of calls. No real ranks of several hosts have run this.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.all2all.base import ExpertInput, MaskedInput
from kernels.all2all.deepep_hosts import DeepEpHostsAllToAll
from kernels.all2all.deepep_limits import MAX_SMS
from kernels.all2all.deepep_low_latency import DeepEpLowLatencyAllToAll
from kernels.block_fp8 import quantise_groups
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.routing.permute import Permutation
from tests.distributed import deep_ep_fake, test_all2all
from tests.distributed.rank_pool import GroupInfo, RankPool
from tests.distributed.test_all2all import HIDDEN, Case
from tests.distributed.test_deepep import MaskedReference

RANKS, GPUS_PER_HOST, DECODES = 4, 2, 8
CASE = Case((5,) * RANKS, num_experts=8, top_k=3, dtype=torch.bfloat16)
MODES = {"contiguous": ExpertInput, "masked": MaskedInput}
LOW_LATENCY = ["low_latency_dispatch", "low_latency_combine"]
NORMAL = ["dispatch", "combine", "clean"]


def hosts(
    num_ranks: int, hidden: int = HIDDEN, max_decodes: int = DECODES, fp8: bool = False
) -> DeepEpHostsAllToAll:
    order = Permutation(
        range(CASE.num_experts // num_ranks),
        num_experts=CASE.num_experts,
        device="cpu",
        dtype=torch.int64,
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    return DeepEpHostsAllToAll(
        group,
        order,
        num_experts=CASE.num_experts,
        hidden_size=hidden,
        max_decodes=max_decodes,
        fp8=fp8,
        masked_fp8=fp8,
        device=torch.device("cpu"),
    )


def of_size(num_rows: int, routing: str = "random") -> Case:
    return replace(CASE, tokens=(num_rows,) * RANKS, routing=routing)


class Layer:
    """Experts behind an all-to-all, in both layouts."""

    def __init__(self, rank: int, num_ranks: int):
        local = CASE.num_experts // num_ranks
        self.rank = rank
        self.weights = test_all2all._weights(CASE)
        self.own = [w[rank * local : (rank + 1) * local] for w in self.weights]
        self.gemms: dict[type, Any] = {
            ExpertInput: ReferenceGroupedGemm(),
            MaskedInput: MaskedReference(),
        }

    def combine(self, all2all: DeepEpHostsAllToAll, routed: Any) -> Any:
        return all2all.combine(self.gemms[type(routed)](routed, *self.own), routed.handle)

    def check(self, inputs: tuple[torch.Tensor, ...], out_TD: torch.Tensor) -> None:
        expected_TD = test_all2all.dense_reference(*inputs, *self.weights)  # type: ignore[misc]
        assert out_TD.shape == expected_TD.shape
        torch.testing.assert_close(out_TD.float(), expected_TD, atol=3e-2, rtol=3e-2)


def run_sizes(rank: int, num_ranks: int, info: GroupInfo) -> tuple[list[str], int]:
    """One exchange after another, each checked; returns the launches and the buffers left."""
    deep_ep_fake.install(GPUS_PER_HOST)
    all2all, layer = hosts(num_ranks), Layer(rank, num_ranks)
    for routing in ("random", "one", "padding", "nobody"):
        for num_rows, layout in ((DECODES, "masked"), (DECODES + 1, "contiguous"), (1, "masked")):
            inputs = test_all2all._draw(of_size(num_rows, routing), rank, 0)
            routed = all2all.dispatch(*inputs).wait()
            assert type(routed) is MODES[layout]
            layer.check(inputs, layer.combine(all2all, routed).wait())
            assert all2all._shared.buffer.flags_clear  # a graph may be replayed behind any exchange
    calls = all2all._shared.buffer.calls
    all2all.close()
    return calls, deep_ep_fake.FakeBuffer.alive


def test_the_rows_of_a_step_choose_the_mode(rank_pool: RankPool):
    expected = [*LOW_LATENCY, *NORMAL, *LOW_LATENCY] * 4
    assert rank_pool.run(run_sizes, RANKS) == [(expected, 0)] * RANKS


def run_crossed(rank: int, num_ranks: int, info: GroupInfo) -> list[str]:
    """Two ubatches with an instance each, in both modes at once: each send receives what is outstanding first."""
    deep_ep_fake.install(GPUS_PER_HOST)
    whole, layer = hosts(num_ranks), Layer(rank, num_ranks)
    pair = [hosts(num_ranks, max_decodes=4), hosts(num_ranks, max_decodes=4)]
    drawn = [test_all2all._draw(of_size(rows), rank, rows) for rows in (4, 9)]
    for order in ((0, 1), (1, 0)):
        sent = {at: pair[at].dispatch(*drawn[at]) for at in order}
        back = {at: layer.combine(pair[at], sent[at].wait()) for at in order}
        for at in order:
            layer.check(drawn[at], back[at].wait())
    buffer = whole._shared.buffer
    assert buffer.flags_clear and buffer is pair[1]._shared.buffer
    calls = buffer.calls
    for all2all in (*pair, whole):
        assert deep_ep_fake.FakeBuffer.alive == 1
        all2all.close()
    assert deep_ep_fake.FakeBuffer.alive == 0
    return calls


def test_ubatches_in_both_modes(rank_pool: RankPool):
    first = ["low_latency_dispatch", "dispatch", "clean", "low_latency_combine", "combine", "clean"]
    second = ["dispatch", "clean", "low_latency_dispatch", *NORMAL[1:], "low_latency_combine"]
    assert rank_pool.run(run_crossed, RANKS) == [first + second] * RANKS


def run_reset(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """A step ends between a dispatch and its combine on all ranks; the next decode finds clear flags."""
    deep_ep_fake.install(GPUS_PER_HOST)
    all2all, layer = hosts(num_ranks), Layer(rank, num_ranks)
    all2all.dispatch(*test_all2all._draw(of_size(20), rank, 0)).wait()
    assert not all2all._shared.buffer.flags_clear
    all2all.reset()
    assert all2all._shared.buffer.flags_clear
    inputs = test_all2all._draw(of_size(2), rank, 0)
    layer.check(inputs, layer.combine(all2all, all2all.dispatch(*inputs).wait()).wait())
    all2all.close()


def test_a_step_that_ends_between_dispatch_and_combine(rank_pool: RankPool):
    rank_pool.run(run_reset, RANKS)


def run_abort(rank: int, num_ranks: int, info: GroupInfo) -> list[str]:
    deep_ep_fake.install(GPUS_PER_HOST)
    all2all = hosts(num_ranks)
    routed = all2all.dispatch(*test_all2all._draw(of_size(20), rank, 0)).wait()
    before = list(all2all._shared.buffer.calls)
    all2all.abort()
    for num_rows in (2, 20):
        with pytest.raises(RuntimeError, match="was aborted"):
            all2all.dispatch(*test_all2all._draw(of_size(num_rows), rank, 0))
    with pytest.raises(RuntimeError, match="was aborted"):
        all2all.combine(routed.x_RD, routed.handle)
    all2all.reset()
    assert all2all._shared.buffer.calls == before == ["dispatch"]
    all2all.close()
    return before


def test_nothing_is_sent_after_an_abort(rank_pool: RankPool):
    rank_pool.run(run_abort, RANKS)


def run_num_sms(rank: int, num_ranks: int, info: GroupInfo) -> list[int]:
    deep_ep_fake.install(GPUS_PER_HOST)
    all2all, layer = hosts(num_ranks), Layer(rank, num_ranks)
    used = []
    for num_sms in (None, 20, 7, 1, 500):
        all2all.set_num_sms(num_sms)
        routed = all2all.dispatch(*test_all2all._draw(of_size(10), rank, 0)).wait()
        used.append(routed.handle.origin.combine_config.num_sms)
        all2all.set_num_sms(16)  # combine goes on with what its dispatch had
        layer.combine(all2all, routed).wait()
    all2all.close()
    return used


def test_sms_between_hosts(rank_pool: RankPool):
    expected = [MAX_SMS, 20, 6, deep_ep_fake.MIN_SMS_BETWEEN_HOSTS, MAX_SMS]
    assert rank_pool.run(run_num_sms, RANKS) == [expected] * RANKS


def run_fp8(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """Rows of both modes arrive in e4m3, each with the scales of its values."""
    deep_ep_fake.install(GPUS_PER_HOST)
    hidden, local = 256, CASE.num_experts // num_ranks
    all2all = hosts(num_ranks, hidden, fp8=True)
    x_TD = torch.randn(20, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids_TK = torch.arange(20).unsqueeze(1) % CASE.num_experts
    for num_rows in (DECODES, 20):
        sent = x_TD[:num_rows], ids_TK[:num_rows], torch.ones(num_rows, 1)
        routed = all2all.dispatch(*sent).wait()
        if isinstance(routed, MaskedInput):
            assert routed.scale_eMS is not None
            values, scales = routed.x_eMD[0, 0], routed.scale_eMS[0, 0]
            y = torch.zeros(routed.x_eMD.shape, dtype=torch.bfloat16)
        else:
            assert routed.scale_RS is not None and len(routed.x_RD) == routed.offs_e[-1]
            values, scales = routed.x_RD[0], routed.scale_RS[0]
            y = torch.zeros(routed.x_RD.shape, dtype=torch.bfloat16)
        assert values.dtype == torch.float8_e4m3fn
        own = x_TD[rank * local].unsqueeze(0)  # the first row of this rank's first expert
        rounded, scale = quantise_groups(own)
        torch.testing.assert_close(values.float(), rounded[0].float(), atol=0, rtol=0.13)
        torch.testing.assert_close(scales, scale[0])
        all2all.combine(y, routed.handle).wait()
    all2all.close()


def test_rows_in_fp8_between_hosts(rank_pool: RankPool):
    rank_pool.run(run_fp8, RANKS)


def run_low_latency_alone(rank: int, num_ranks: int, info: GroupInfo) -> list[str]:
    """Hosts with fewer than 8 GPUs: the low-latency mode alone serves them."""
    deep_ep_fake.install()
    group = torch.distributed.group.WORLD
    assert group is not None
    all2all = DeepEpLowLatencyAllToAll(
        group,
        num_experts=CASE.num_experts,
        hidden_size=HIDDEN,
        max_num_tokens=32,
        use_fp8=False,
        device=torch.device("cpu"),
    )
    layer = Layer(rank, num_ranks)
    inputs = test_all2all._draw(of_size(20), rank, 0)
    layer.check(inputs, layer.combine(all2all, all2all.dispatch(*inputs).wait()).wait())  # type: ignore[arg-type]
    all2all.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        all2all.dispatch(*inputs)
    calls: list[str] = all2all._shared.buffer.calls
    all2all.close()
    return calls


def test_low_latency_alone(rank_pool: RankPool):
    assert rank_pool.run(run_low_latency_alone, RANKS) == [LOW_LATENCY] * RANKS
