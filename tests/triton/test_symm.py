"""`symm` and `copy_engine` among ranks whose memory lies in this one process. See tests/gpu/test_all2all_cuda.py too.

Ranks run one after the other, so nobody can wait for what comes later: the signals, assembly that the interpreter does
not know and operations of streams, are left out, and sums are sent by all ranks before they count.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all import copy_engine, symm
from kernels.all2all.base import ExpertInput, sum_partials
from kernels.all2all.copy_engine import CopyEngineAllToAll
from kernels.all2all.payload import RowFormat
from kernels.all2all.peer_memory import HEADER_BYTES
from kernels.block_fp8 import Fp8Rows, quantise_groups
from kernels.triton import push_rows, push_sums
from kernels.triton.quantise_rows import quantise_rows
from tests.closeness import assert_near
from tests.triton.device import COMPILED
from tests.triton.symm_ranks import build_ranks

pytestmark = pytest.mark.skipif(COMPILED, reason="the interpreter's part; GPUs run the whole")

NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 7, 3, 24, 17  # one more than a program takes at a time
FP8_HIDDEN = 384
# A rounding of each answer and of each rank's sum; the interpreter cuts bfloat16 off.
ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 6e-2}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (push_rows, push_sums):
        monkeypatch.setattr(module, "signal_ranks", lambda *_: None)
        monkeypatch.setattr(module, "wait_for_ranks", lambda *_: None)


@pytest.fixture
def stream(one_process: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that does all at once."""
    found = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    signals = SimpleNamespace(signal_and_wait=lambda stream: None)
    monkeypatch.setattr(copy_engine, "StreamSignals", lambda memory, at: signals)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found)
    for module in (copy_engine, symm):
        monkeypatch.setattr(module, "on_comm_stream", lambda stream: nullcontext())
    return found


def draw(
    num_tokens: int, seed: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[torch.Tensor, ...]:
    """x, topk_idx with some of -1, topk_weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    ids = scores.topk(TOP_K).indices
    ids[1::4, 0] = -1
    ids[3::4] = -1
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    return x, ids, torch.rand(num_tokens, TOP_K, generator=generator)


def answer(routed: ExpertInput, experts: range) -> torch.Tensor:
    """Expert e gives (e + 1) * x; what lies at nobody's places is NaN."""
    routing = routed.device_routing()
    if routed.scale_RS is None:
        x_RD = routed.permuted_rows()
    else:
        scale_ND = routed.scale_RS.repeat_interleave(128, 1)
        x_RD = (routed.x_RD.float() * scale_ND)[routing.row_R.clamp(0, len(scale_ND) - 1).long()]
    y_RD = torch.full_like(x_RD, float("nan"))
    for expert, start, end in zip(experts, routing.starts_e, routing.ends_e, strict=True):
        y_RD[start:end] = x_RD[start:end] * (expert + 1)
    return y_RD


def placed(x_TD: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
    """An even number of rows goes where the exchange wants them, where it does."""
    return x_TD if room is None or len(x_TD) % 2 else room.copy_(x_TD)


def check(
    ranks: list[Any],
    num_tokens: int,
    seed: int,
    dtype: torch.dtype,
    *,
    rounding: Callable[[torch.Tensor], Fp8Rows] | None = None,
) -> None:
    """An exchange there and back gives each row the sum of its experts' answers; rounding: of the row in FP8."""
    hidden = FP8_HIDDEN if rounding else HIDDEN
    inputs = [draw(num_tokens, seed + rank, dtype, hidden) for rank in range(len(ranks))]
    arrivals = [
        exchange.dispatch(placed(x, exchange.dispatch_buffer(num_tokens)), ids, weights)
        for exchange, (x, ids, weights) in zip(ranks, inputs, strict=True)
    ]
    routed = [arrival.wait() for arrival in arrivals]
    experts = [exchange._permutation.experts for exchange in ranks]
    answers = [answer(*each) for each in zip(routed, experts, strict=True)]
    for _ in range(2):  # with the second one all ranks' sums are there
        pending = [
            exchange.combine(y_RD, its.handle)
            for exchange, y_RD, its in zip(ranks, answers, routed, strict=True)
        ]
    for (x, ids, weights), sums in zip(inputs, pending, strict=True):
        factor = (weights * (ids + 1)).sum(1, keepdim=True)  # an id of -1 adds nothing
        if rounding:
            values, scales = rounding(x)
            x = values.float() * scales.repeat_interleave(128, 1)
        assert_near(sum_partials(sums.wait()), x.float() * factor, ERRORS)


@pytest.mark.parametrize(
    ("num_ranks", "num_sms", "dtype"),
    [
        (1, None, torch.float32),
        (2, None, torch.float16),
        (3, 1, torch.float32),
        (3, 2, torch.bfloat16),
        pytest.param(
            8, 1, torch.float32, marks=pytest.mark.exhaustive
        ),  # one of them without experts
    ],
)
def test_kernels_bring_rows_to_their_experts_and_back(one_process, num_ranks, num_sms, dtype):
    row_format = RowFormat(HIDDEN, TOP_K, dtype)
    ranks = build_ranks(num_ranks, NUM_EXPERTS, row_format, MAX_TOKENS)
    for exchange in ranks:
        exchange.set_num_sms(num_sms)
    for call, num_tokens in enumerate((4, 0, MAX_TOKENS, 1) if num_ranks < 8 else (5, 3)):
        check(ranks, num_tokens, 10 * call, dtype)


def test_sums_do_not_need_rows_that_a_peer_may_write_by_then(one_process, monkeypatch):
    """A peer that has all sums writes the rows of its next dispatch, of another number, while this rank adds."""
    row_format = RowFormat(HIDDEN, TOP_K, torch.float32)
    ranks = build_ranks(2, NUM_EXPERTS, row_format, MAX_TOKENS)
    size = row_format.row_bytes * len(ranks) * MAX_TOKENS
    for exchange in ranks:
        exchange.set_num_sms(1)  # one program, which has sent all sums before it adds

    def next_rows(*_: object) -> None:
        for exchange in ranks:
            exchange._memory.local[HEADER_BYTES : HEADER_BYTES + size] = 255

    arrivals = [
        exchange.dispatch(*draw(5, rank, torch.float32)) for rank, exchange in enumerate(ranks)
    ]
    routed = [arrival.wait() for arrival in arrivals]
    answers = [
        answer(it, exchange._permutation.experts)
        for exchange, it in zip(ranks, routed, strict=True)
    ]
    for exchange, y_RD, it in zip(ranks, answers, routed, strict=True):
        expected = exchange.combine(y_RD, it.handle).wait()
    monkeypatch.setattr(push_sums, "wait_for_ranks", next_rows)
    assert torch.equal(ranks[-1].combine(answers[-1], routed[-1].handle).wait(), expected)


@pytest.mark.parametrize(("num_ranks", "num_sms"), [(1, None), (2, 1), (3, 2)])
def test_kernels_bring_rows_in_fp8(one_process, num_ranks, num_sms):
    """The values and scales that arrive are the values and scales of rounding on arrival."""
    row_format = RowFormat(FP8_HIDDEN, TOP_K, torch.float32, fp8=True)
    ranks = build_ranks(num_ranks, NUM_EXPERTS, row_format, MAX_TOKENS)
    for exchange in ranks:
        exchange.set_num_sms(num_sms)
    for call, num_tokens in enumerate((4, 0, 13, 1)):
        check(ranks, num_tokens, 10 * call, torch.float32, rounding=quantise_rows)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_copies_bring_rows_in_fp8(stream, num_ranks):
    """No norm can write such rows where they are sent from."""
    row_format = RowFormat(FP8_HIDDEN, TOP_K, torch.float32, fp8=True)
    ranks = build_ranks(num_ranks, NUM_EXPERTS, row_format, MAX_TOKENS, kind=CopyEngineAllToAll)
    for exchange in ranks:
        exchange.stream, exchange.kernel_rows = stream, 2
        assert exchange.dispatch_buffer(8) is None
    for call, num_tokens in enumerate((4, 13, 5)):  # packed by torch on a CPU
        check(ranks, num_tokens, 10 * call, torch.float32, rounding=quantise_groups)


@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32)]
)
def test_copies_bring_rows_to_their_experts_and_back(stream, num_ranks, dtype):
    """Few rows go by the kernels."""
    row_format = RowFormat(HIDDEN, TOP_K, dtype)
    ranks = build_ranks(num_ranks, NUM_EXPERTS, row_format, MAX_TOKENS, kind=CopyEngineAllToAll)
    for exchange in ranks:
        exchange.stream, exchange.kernel_rows = stream, 2
    for call, num_tokens in enumerate((4, 1, 13, 5)):
        check(ranks, num_tokens, 10 * call, dtype)
