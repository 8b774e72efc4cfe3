"""Records when each ubatch of a forward computed and when its all-to-alls were in flight. Costs nothing unless used.

A recorder wraps the all-to-alls of the backends that a forward runs with. It records times on the thread that computes,
or on a GPU events on the stream that the ubatch computes on; the time between two all-to-alls of a ubatch is its
compute. In a CUDA graph the events are nodes of the graph: each replay sets them anew.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.backends.select import Backends
from kernels.pending import Pending
from workers.trace.spans import AllToAllSpan, ComputeSpan, Operation, StepTrace

# A time by the host's clock, or an event on the device.
Moment = float | torch.cuda.Event
NEXT_MOMENT_S = (
    2e-5  # longest time between two moments with nothing but the model's Python in between
)


class SpanRecorder:
    """Records forwards that run with the result of `record`, one forward between `start` and `stop` at a time."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._recorded: list[_AllToAllMoments] = []
        self._num_rows = 0
        self._start: Moment = 0.0
        self._started_s = 0.0

    def record(self, backends: Backends, ubatch: int) -> Backends:
        """Return the same backends; all-to-alls made with them are recorded for this ubatch."""
        return replace(backends, all2all=_RecordedAllToAll(backends.all2all, ubatch, self))

    def start(self, num_rows: int = 0) -> None:
        """Discard earlier records and begin to record a forward of `num_rows` rows."""
        self._recorded, self._num_rows = [], num_rows
        self._started_s = time.perf_counter()
        self._start = self.now()

    def stop(self) -> "Recording":
        """Return what was recorded since `start`."""
        captured = self._on_cuda and torch.cuda.is_current_stream_capturing()
        end = self.now()
        launched = None
        if self._on_cuda and not captured:
            launched = time.perf_counter() - self._started_s
        return Recording(self._recorded, self._num_rows, self._start, end, launched, captured)

    def finish(self) -> StepTrace:
        """Return the spans since `start`; on CUDA this waits for the device."""
        return self.stop().trace()

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """Return the time; on CUDA an event on `stream`, or on the current stream."""
        if not self._on_cuda:
            return time.perf_counter()
        # Only an external event becomes a node of a graph.
        external = torch.cuda.is_current_stream_capturing()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream())
        return event

    def follow(
        self,
        operation: Operation,
        ubatch: int,
        inner: AllToAll,
        call: Callable[[], Pending[Any]],
    ) -> Pending[Any]:
        """Start an all-to-all of a ubatch and record its moments."""
        called = self.now()
        pending = call()
        stream = inner.stream if inner.runs_on_stream else None
        done = None if stream is None else self.now(stream)
        moments = _AllToAllMoments(operation, ubatch, [called, self.now()], done)
        self._recorded.append(moments)
        return _RecordedPending(pending, lambda: moments.times.append(self.now()))


class _RecordedPending(Pending[Any]):
    """A pending result; records when its ubatch waits for it, when the ubatch continues, and when it has the result."""

    def __init__(self, pending: Pending[Any], record: Callable[[], None]):
        super().__init__(self._finish_recorded)
        self._pending, self._record = pending, record

    def wait(self) -> Any:
        if self._finish is not None:
            self._record()
        return super().wait()

    def _finish_recorded(self) -> Any:
        self._record()
        result = self._pending.result()
        self._record()
        return result


@dataclass
class _AllToAllMoments:
    """The moments of one all-to-all; `times` in the order of AllToAllSpan's fields, called to arrived."""

    operation: Operation
    ubatch: int
    times: list[Moment]
    done: Moment | None


@dataclass(frozen=True)
class Recording:
    """The moments of one forward; in a CUDA graph (`captured`) they have the times of its last replay."""

    all2alls: list[_AllToAllMoments]
    num_rows: int
    start: Moment
    end: Moment
    launched: float | None
    captured: bool

    def happened(self) -> bool:
        """Return whether the moments have times; the moments of a graph without a replay have none."""
        try:
            return self._seconds(self.end) > 0
        except RuntimeError:
            return False

    def trace(self) -> StepTrace:
        """Return the spans; waits for the device."""
        if not isinstance(self.end, float):
            self.end.synchronize()
        all2alls = []
        for found in self.all2alls:
            called, sent, idle, awaited, arrived = map(self._seconds, found.times)
            done = None if found.done is None else self._seconds(found.done)
            times = (called, sent, idle, awaited, arrived, done)
            all2alls.append(AllToAllSpan(found.operation, found.ubatch, *times))
        seconds = self._seconds(self.end)
        # In a graph each ubatch has a stream of its own.
        computes = compute_spans(all2alls, seconds, side_by_side=self.captured)
        in_order = sorted(computes, key=lambda one: one.begin)
        return StepTrace(all2alls, in_order, seconds, self.launched)

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float) or isinstance(self.start, float):
            assert isinstance(moment, float) and isinstance(self.start, float)
            return moment - self.start
        return float(self.start.elapsed_time(moment)) / 1e3


class _RecordedAllToAll(AllToAll):
    """Another all-to-all with calls that a recorder follows."""

    def __init__(self, inner: AllToAll, ubatch: int, recorder: SpanRecorder):
        self.name, self.layout, self.graph = inner.name, inner.layout, inner.graph
        self.needs_equal_tokens, self.stream = inner.needs_equal_tokens, inner.stream
        self._inner, self._ubatch, self._recorder = inner, ubatch, recorder

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        call = partial(self._inner.dispatch, x_TD, topk_idx_TK, topk_weights_TK)
        return self._recorder.follow("dispatch", self._ubatch, self._inner, call)

    def dispatch_buffer(self, num_rows: int) -> torch.Tensor | None:
        return self._inner.dispatch_buffer(num_rows)

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        call = partial(self._inner.combine, y_RD, handle)
        return self._recorder.follow("combine", self._ubatch, self._inner, call)

    def set_num_sms(self, num_sms: int | None) -> None:
        self._inner.set_num_sms(num_sms)

    def close(self) -> None:
        self._inner.close()


_PRECEDES: dict[str, Any] = {"dispatch": "attention", "combine": "experts"}


def compute_spans(
    all2alls: list[AllToAllSpan], seconds: float, *, side_by_side: bool
) -> Iterator[ComputeSpan]:
    """Yield the time between all-to-alls, ubatch by ubatch.

    side_by_side   all ubatches begin with the forward; otherwise each begins where the one before first waits
    """
    begin = 0.0
    for ubatch in range(1 + max((x.ubatch for x in all2alls), default=0)):
        own = [x for x in all2alls if x.ubatch == ubatch]
        end = begin
        for x in own:
            yield ComputeSpan(_PRECEDES[x.operation], ubatch, end, x.called)
            if x.idle - x.sent > NEXT_MOMENT_S:
                yield ComputeSpan("rest", ubatch, x.sent, x.idle)
            end = x.arrived
        if not side_by_side and own:
            begin = own[0].idle
    yield ComputeSpan("end", ubatch, end, seconds)
