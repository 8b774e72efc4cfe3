"""Each ubatch computes on a stream of its own: who is on which, and what waits for what. Streams are fakes."""

from types import SimpleNamespace

import pytest
import torch

from kernels.all2all import comm_stream as comm_stream
from kernels.all2all.comm_stream import on_comm_stream
from kernels.pending import Pending, wait_previous_ubatch
from workers.ubatch.wrapper import UBatchWrapper, alternate, forked

CUDA = torch.device("cuda", 0)


class FakeStream:
    """Notes what it waits for: other streams, and events, which are (stream, how many were recorded there before)."""

    def __init__(self, name: str, others: tuple["FakeStream", ...] = ()):
        self.name, self.others = name, others
        self.cuda_stream = hash(name)
        self.waits: list[object] = []
        self._recorded = 0

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append(other.name)

    def record_event(self) -> tuple[str, int]:
        self._recorded += 1
        return self.name, self._recorded - 1

    def wait_event(self, event: tuple[str, int]) -> None:
        self.waits.append(event)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A thread with a current stream, `caller` at first, one of three that there are."""
    streams = {name: FakeStream(name) for name in ("caller", "a", "b")}
    state = SimpleNamespace(current=streams["caller"], streams=streams, capturing=True)

    def enter(stream: FakeStream) -> None:
        state.current = stream

    raw = lambda index: state.current.cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.current)
    monkeypatch.setattr(torch.cuda, "set_stream", enter)
    return state


def test_each_ubatch_goes_on_where_it_was(thread):
    seen = []

    def task(name: str, num_waits: int):
        def run() -> str:
            for _ in range(num_waits):
                seen.append((name, thread.current.name))
                Pending(lambda: None).wait()
            seen.append((name, thread.current.name))
            return name

        return run

    tasks = [task("caller", 1), task("a", 3), task("b", 2)]
    streams = [thread.streams[name] for name in ("caller", "a", "b")]
    assert alternate(tasks, CUDA, streams) == ["caller", "a", "b"]
    assert all(name == stream for name, stream in seen) and len(seen) == 9
    assert thread.current.name == "caller"


@pytest.mark.parametrize("at_end", [False, True])
def test_a_ubatch_that_leaves_its_stream_is_refused(thread, at_end):
    def careless() -> None:
        torch.cuda.set_stream(thread.streams["b"])
        if not at_end:
            Pending(lambda: None).wait()

    with pytest.raises(AssertionError, match="context manager"):
        alternate([lambda: None, careless], CUDA, [thread.streams["caller"], thread.streams["a"]])
    assert thread.current.name == "caller"


def test_an_error_leaves_the_caller_on_its_stream(thread):
    def failing() -> None:
        Pending(lambda: None).wait()
        raise RuntimeError("fails")

    with pytest.raises(RuntimeError, match="fails"):
        alternate([failing] * 2, CUDA, [thread.streams["a"], thread.streams["b"]])
    assert thread.current.name == "caller"


@pytest.mark.parametrize("fails", [False, True])
def test_streams_fork_and_join(thread, fails):
    a, b, caller = (thread.streams[name] for name in ("a", "b", "caller"))
    try:
        with forked([None, a, b, None]):
            assert a.waits == b.waits == ["caller"] and not caller.waits
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert caller.waits == ["a", "b"]


def test_the_middle_of_a_turn_comes_after_the_turns_before(thread):
    """At each layer a ubatch waits for all that the ubatch before it had given its stream when it handed over."""
    names = ("caller", "a", "b")

    def task(name: str, num_layers: int):
        def run() -> None:
            for _ in range(num_layers):
                wait_previous_ubatch()
                Pending(lambda: None).wait()

        return run

    streams = [thread.streams[name] for name in names]
    alternate([task(name, 2) for name in names], CUDA, streams)
    assert thread.streams["caller"].waits == [("b", 0)]
    assert thread.streams["a"].waits == [("caller", 0), ("caller", 1)]
    assert thread.streams["b"].waits == [("a", 0), ("a", 1)]


def test_a_ubatch_comes_after_one_that_never_waited(thread):
    """A model's layers without experts have no exchange, but caches."""
    streams = [thread.streams[name] for name in ("caller", "a")]
    alternate([wait_previous_ubatch, wait_previous_ubatch], CUDA, streams)
    assert streams[0].waits == [] and streams[1].waits == [("caller", 0)]


def test_ubatches_on_one_stream_need_no_order(thread):
    def task() -> None:
        wait_previous_ubatch()
        Pending(lambda: None).wait()
        wait_previous_ubatch()

    alternate([task, task], CUDA)
    wait_previous_ubatch()  # nor does what is no ubatch
    assert not any(stream.waits for stream in thread.streams.values())


@pytest.mark.parametrize("capturing", [False, True])
def test_ubatches_part_in_graphs_alone(thread, capturing):
    """Their exchanges do everywhere; afterwards the caller's stream waits for all that was beside it."""
    thread.capturing, seen = capturing, []

    class Model:
        def with_backends(self, backends: object) -> "Model":
            return self

        def forward(self, part: object) -> torch.Tensor:
            seen.append(thread.current.name)
            Pending(lambda: None).wait()
            seen.append(thread.current.name)
            return torch.zeros(1)

    sides = [FakeStream("side 0"), FakeStream("side 1")]
    backends = [
        SimpleNamespace(stream=stream, all2all=SimpleNamespace(stream=side))
        for stream, side in zip((None, thread.streams["a"]), sides, strict=True)
    ]
    wrapper = UBatchWrapper(Model(), backends)
    wrapper._planned_rows = 4
    batch = SimpleNamespace(
        input_ids=SimpleNamespace(device=CUDA), num_rows=4, ubatch=lambda start, end: None
    )
    assert wrapper.forward(batch).shape == (2,)
    assert seen == ["caller", "a" if capturing else "caller"] * 2
    assert thread.streams["caller"].waits == ["a"] * capturing + ["side 0", "side 1"]
    assert [side.waits for side in sides] == [["caller"]] * 2


def test_exchanges_of_ubatches_run_one_after_the_other(thread, monkeypatch):
    class Made(FakeStream):
        def __init__(self, device: torch.device, priority: int):
            super().__init__(f"side {len(made)}")
            made.append(self)

    class On:
        def __init__(self, stream: FakeStream):
            self._stream, self._before = stream, thread.current

        def __enter__(self) -> None:
            torch.cuda.set_stream(self._stream)

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_stream(self._before)

    made: list[FakeStream] = []
    monkeypatch.setattr(comm_stream, "CommStream", Made)
    monkeypatch.setattr(torch.cuda, "stream", On)
    first, second = comm_stream.comm_streams(torch.device("cuda"), 2)
    thread.current = thread.streams["a"]
    with on_comm_stream(first):
        assert thread.current is first
    assert first.waits == ["a", "side 1"] and thread.current.name == "a"
    with on_comm_stream(second):
        assert thread.current is second
    assert second.waits == ["a", "side 0"]
