"""Waiting for bytes of a socket, while the core is yielded and asleep."""

import socket
import threading
import time

import pytest

from kernels.host import readable
from kernels.host.readable import Readable


@pytest.mark.parametrize("yield_s", [0.0, 1e-3, 60.0])
def test_bytes_that_arrive_during_the_wait_end_it(
    monkeypatch: pytest.MonkeyPatch, yield_s: float
) -> None:
    monkeypatch.setattr(readable, "YIELD_S", yield_s)
    here, there = socket.socketpair()
    with here, there:
        subject = Readable(here)
        timer = threading.Timer(0.05, there.send, (b"x",))
        timer.start()
        assert subject.wait(30) and here.recv(10) == b"x"
        timer.join()
        there.close()
        assert subject.wait(30) and here.recv(10) == b"", "the end of a stream"


def test_a_wait_without_bytes_ends() -> None:
    here, there = socket.socketpair()
    with here, there:
        started = time.monotonic()
        assert not Readable(here).wait(0.01)
        assert time.monotonic() - started >= 0.01
