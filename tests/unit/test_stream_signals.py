"""What a stream is told to write and to await, as the driver reads it; GPUs run it in tests/gpu."""

import ctypes
import struct
from types import SimpleNamespace

import pytest

from kernels.all2all import stream_signals
from kernels.all2all.stream_signals import StreamSignals

WAIT, WRITE, EQUAL = 1, 2, 1


class FakeDriver:
    """Keeps the bytes of each batch; answers `code`."""

    def __init__(self, code: int = 0):
        self.code = code
        self.batches: list[list[tuple[int, int, int, int]]] = []

    def cuStreamBatchMemOp_v2(self, stream, count, operations, flags):
        raw = ctypes.string_at(ctypes.addressof(operations), 48 * count)
        # int operation; CUdeviceptr address; uint32 or uint64 value; unsigned flags; padding up to 48 bytes
        self.batches.append(list(struct.iter_unpack("<I4xQQI20x", raw)))
        assert (stream.value, flags) == (5, 0)
        return self.code

    def cuGetErrorString(self, code, text):
        text._obj.value = b"not permitted"


def signals(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, rank: int, num_ranks: int):
    monkeypatch.setattr(stream_signals, "_driver", lambda: driver)
    memory = SimpleNamespace(
        rank=rank, num_ranks=num_ranks, address=lambda peer, offset: 1000 * peer + offset
    )
    return StreamSignals(memory, 64)


def test_peers_are_told_then_awaited_then_their_words_taken_back(monkeypatch):
    driver = FakeDriver()
    own = signals(monkeypatch, driver, rank=1, num_ranks=3)
    own.signal_and_wait(SimpleNamespace(cuda_stream=5))
    told = [(WRITE, 64 + 4, 1, 0), (WRITE, 2064 + 4, 1, 0)]
    awaited = [(WAIT, 1064, 1, EQUAL), (WAIT, 1064 + 8, 1, EQUAL)]
    taken_back = [(WRITE, 1064, 0, 0), (WRITE, 1064 + 8, 0, 0)]
    assert driver.batches == [told + awaited + taken_back]


def test_a_release_writes_the_words_that_this_rank_awaits(monkeypatch):
    driver = FakeDriver()
    signals(monkeypatch, driver, rank=1, num_ranks=3).release(SimpleNamespace(cuda_stream=5))
    assert driver.batches == [[(WRITE, 1064, 1, 0), (WRITE, 1064 + 8, 1, 0)]]


def test_a_refusal_says_why(monkeypatch):
    own = signals(monkeypatch, FakeDriver(800), rank=0, num_ranks=2)
    with pytest.raises(RuntimeError, match=r"cuStreamBatchMemOp: not permitted \(800\)"):
        own.signal_and_wait(SimpleNamespace(cuda_stream=5))
