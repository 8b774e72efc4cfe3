"""A source of KV whose keeper is slow or stopped: the thread that serves reads of other nodes does not wait for it."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from workers.kv_transfer import kv_source
from workers.kv_transfer.keeper_client import KeeperStoppedError
from workers.kv_transfer.kv_source import Form, Held, SourceLink, SourceServer
from workers.kv_transfer.nixl_memory import Registered

FORM = Form(b"f" * 16, 512)
NAMES = [b"a" * 32, b"b" * 32]


class FakeKeeper:
    """The connections of a source to its keeper. `go` lets requests of the method `held` pass."""

    def __init__(self, held: str = "") -> None:
        self.held, self.go, self.entered = held, threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.num_open = 0
        self.left = threading.Semaphore(0)

    def attach(self) -> Any:
        self.wait("attach")
        self.num_open += 1
        return FakeClient(self)

    def wait(self, method: str) -> None:
        if method == self.held:
            self.entered.set()
            assert self.go.wait(60)
            if self.error is not None:
                raise self.error


class FakeClient:
    def __init__(self, keeper: FakeKeeper):
        self._keeper = keeper

    def join(self, *form: Any) -> bool:
        return form == FORM

    def find(self, names: list[bytes]) -> list[Any]:
        return [([1, 2], 7, "host"), None][: len(names)]

    def leave(self) -> None:
        self._keeper.wait("leave")

    def close(self) -> None:
        self._keeper.num_open -= 1
        self._keeper.left.release()


class Source:
    """A source, and readers on threads."""

    def __init__(self, keeper: FakeKeeper):
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        registered = Registered("agent", b"metadata", 4096)
        self.server = SourceServer(self.context, "127.0.0.1", registered, keeper.attach, 60.0)
        self.links: list[SourceLink] = []
        self.threads = ThreadPoolExecutor()

    def find(self, form: Form = FORM) -> "Future[tuple[Registered, list[Held | None]]]":
        """Begin a lease."""
        return self.threads.submit(self.connect().find, form, NAMES, 60)

    def connect(self) -> SourceLink:
        self.links.append(SourceLink(self.context, self.server.source))
        return self.links[-1]

    def begin(self) -> SourceLink:
        """Begin a lease, and wait for no answer."""
        link = self.connect()
        message = "find", FORM.compatibility.hex(), FORM.unit_bytes, [name.hex() for name in NAMES]
        link._socket.send(json.dumps(message).encode())
        return link

    def serve_until(self, condition: Callable[[], bool]) -> None:
        """Do what the process does in its loop, which must not wait for the keeper."""
        for _ in range(60_000):
            if condition():
                return
            self.server.socket.poll(1)
            self.server.answer()
            self.server.expire()
        raise AssertionError("nothing has come")


@contextmanager
def source(keeper: FakeKeeper) -> Iterator[Source]:
    now = Source(keeper)
    try:
        yield now
    finally:
        keeper.go.set()
        for link in now.links:
            link.close()
        now.server.close()
        now.threads.shutdown()
        now.context.destroy(linger=0)


def test_a_reader_gets_what_is_held_and_a_refusal() -> None:
    keeper = FakeKeeper()
    with source(keeper) as now:
        found, refused = now.find(), now.find(FORM._replace(unit_bytes=1024))
        now.serve_until(lambda: found.done() and refused.done())
        assert found.result() == (
            Registered("agent", b"metadata", 4096),
            [Held([1, 2], 7), None],
        )
        with pytest.raises(kv_source.RefusedError, match="another model"):
            refused.result()
        assert now.server.num_leases == 1
        now.links[0]._send("end")
        now.serve_until(lambda: not now.server.num_leases)
        assert all(keeper.left.acquire(timeout=60) for _ in range(2)) and not keeper.num_open


def test_other_readers_are_served_while_the_keeper_does_not_answer_one() -> None:
    keeper = FakeKeeper("attach")
    with source(keeper) as now:
        first = now.find()
        now.serve_until(keeper.entered.is_set)
        keeper.held = ""
        second = now.find()
        now.serve_until(second.done)
        assert second.result()[1] == [Held([1, 2], 7), None]
        assert not first.done() and now.server.num_leases == 2
        keeper.go.set()
        now.serve_until(first.done)
        assert first.result()[1] == [Held([1, 2], 7), None]


def test_a_lease_that_ends_before_the_keeper_answers_is_left() -> None:
    keeper = FakeKeeper("attach")
    with source(keeper) as now:
        link = now.begin()
        now.serve_until(keeper.entered.is_set)
        link._send("end")
        now.serve_until(lambda: not now.server.num_leases)
        keeper.go.set()
        assert keeper.left.acquire(timeout=60) and not keeper.num_open


def test_a_keeper_that_is_lost_ends_the_process() -> None:
    keeper = FakeKeeper("attach")
    keeper.error = KeeperStoppedError("no answer to attach within 60 s")
    with source(keeper) as now:
        now.begin()
        now.serve_until(keeper.entered.is_set)
        keeper.go.set()
        with pytest.raises(KeeperStoppedError):
            now.serve_until(lambda: False)


def test_the_end_of_the_process_does_not_wait_for_a_keeper_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_source, "CLOSE_S", 0.01)
    keeper = FakeKeeper("leave")
    with source(keeper) as now:
        found = now.find()
        now.serve_until(found.done)
        now.server.close()
        assert keeper.entered.wait(60) and keeper.num_open == 1
