"""Waits for a peer that never comes end when the abort word is set. See tests/gpu/test_abort_cuda.py too.

In the interpreter acquire loads are plain ones, and ranks do not signal.
"""

import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.all2all.abort_word import AbortWord
from kernels.all2all.payload import RowFormat
from kernels.triton import push_rows, push_sums, signals
from tests.triton.device import COMPILED
from tests.triton.symm_ranks import build_ranks

pytestmark = pytest.mark.skipif(COMPILED, reason="the interpreter's part; GPUs run the whole")


@triton.jit
def plain_load(ptr):
    return tl.load(ptr)


@triton.jit
def wait_kernel(words_ptr, abort_ptr, NUM_RANKS: tl.constexpr):
    signals.wait_for_ranks(words_ptr, tl.load(words_ptr + NUM_RANKS), abort_ptr, NUM_RANKS)


@pytest.fixture(autouse=True)
def no_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_load_acquire", plain_load)
    monkeypatch.setattr(signals, "ABORT_POLLS", tl.constexpr(4))
    for module in (push_rows, push_sums):
        monkeypatch.setattr(module, "signal_ranks", lambda *_: None)


def ends(work: Any, release: Any, seconds: float) -> bool:
    """Whether `work`, on a thread of its own, ends within `seconds`; if it does not, `release` ends it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    ended = not thread.is_alive()
    release()
    thread.join(60)
    assert not thread.is_alive(), "the wait did not end"
    return ended


def test_a_wait_ends_with_the_abort_word_only() -> None:
    abort = AbortWord(torch.device("cpu"))
    words = torch.tensor([0, 1024, 1], dtype=torch.int32)  # two ranks, then the number of the call

    def work() -> None:
        wait_kernel[(1,)](words, abort.word, 2)

    assert not ends(work, abort.set, 0.5), "rank 0 has not signalled"
    assert ends(work, abort.set, 60)


def test_an_exchange_without_its_peer_ends_and_is_reset() -> None:
    """Both directions; afterwards the next dispatch is taken, and waits no more."""
    row_format = RowFormat(24, 3, torch.float32)
    exchange = build_ranks(2, 7, row_format, 21)[0]
    x, ids = torch.randn(4, 24), torch.tensor([[0, 5, -1]] * 4)
    weights = torch.rand(4, 3)

    def dispatch() -> Any:
        return exchange.dispatch(x, ids, weights).wait()

    found: list[Any] = []
    assert not ends(lambda: found.append(dispatch()), exchange.abort, 0.5), "its peer never came"
    assert exchange._calls.tolist() == [1, 0]
    with pytest.raises(AssertionError, match="the last dispatch has no combine"):
        exchange.dispatch(x, ids, weights)
    exchange.reset()
    routed = dispatch()
    answers = torch.zeros_like(routed.permuted_rows())
    assert exchange.combine(answers, routed.handle).wait().shape == (4, 24)
    assert exchange._calls.tolist() == [2, 1]
