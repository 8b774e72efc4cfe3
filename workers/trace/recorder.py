"""What a forward did when: its exchanges and the compute between them, slice by slice. Free where none is made.

A recorder wraps the all-to-alls of the kernels that a forward is run with. Marks lie on the thread that computes, or on
a GPU on the stream that the slice computes on; what passes between two of a slice's exchanges is its compute. In a CUDA
graph the marks are nodes of it: each replay sets them anew.
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
from workers.trace.spans import AllToAllSpan, ComputeSpan, Operation, Schedule

StreamEvent = float | torch.cuda.Event
NEXT_MARK_S = 2e-5  # between two marks with nothing but the model's Python in between, at most


class ScheduleRecorder:
    """Records forwards that run with what `kernels` returned, one between `start` and `stop` at a time."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._marks: list[_Marks] = []
        self._num_rows = 0
        self._start: StreamEvent = 0.0
        self._started_s = 0.0

    def kernels(self, kernels: Backends, index: int) -> Backends:
        """The same, whose exchanges are recorded as those of slice `index`."""
        return replace(kernels, all2all=_Recorded(kernels.all2all, index, self))

    def start(self, num_rows: int = 0) -> None:
        """Forget what was recorded; times are counted from here. The forward is of so many rows."""
        self._marks, self._num_rows = [], num_rows
        self._started_s = time.perf_counter()
        self._start = self.mark()

    def stop(self) -> "Recording":
        """What happened since `start`."""
        captured = self._on_cuda and torch.cuda.is_current_stream_capturing()
        end = self.mark()
        launched = None
        if self._on_cuda and not captured:
            launched = time.perf_counter() - self._started_s
        return Recording(self._marks, self._num_rows, self._start, end, launched, captured)

    def finish(self) -> Schedule:
        """What happened since `start`; on CUDA this waits for the device."""
        return self.stop().schedule()

    def mark(self, stream: torch.cuda.Stream | None = None) -> StreamEvent:
        """Now, or on CUDA when `stream`, or else the current one, is there."""
        if not self._on_cuda:
            return time.perf_counter()
        # Only an external event becomes a node of a graph.
        external = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=external)
        event.record(stream or torch.cuda.current_stream())
        return event

    def follow(
        self, operation: Operation, index: int, inner: AllToAll, call: Callable[[], Pending]
    ) -> Pending:
        """Make an exchange of slice `index`, with marks around what it does."""
        called = self.mark()
        pending = call()
        stream = inner.stream if inner.runs_on_stream else None
        done = None if stream is None else self.mark(stream)
        marks = _Marks(operation, index, [called, self.mark()], done)
        self._marks.append(marks)
        return _Followed(pending, lambda: marks.times.append(self.mark()))


class _Followed(Pending):
    """A result under way, with marks where its slice asks for it, goes on and has it."""

    def __init__(self, pending: Pending, mark: Callable[[], None]):
        super().__init__(self._finish_marked)
        self._pending, self._mark = pending, mark

    def wait(self) -> Any:
        if self._finish is not None:
            self._mark()
        return super().wait()

    def _finish_marked(self) -> Any:
        self._mark()
        result = self._pending.result()
        self._mark()
        return result


@dataclass
class _Marks:
    """An exchange under way, its times in the order of AllToAllSpan's fields."""

    operation: Operation
    slice: int
    times: list[StreamEvent]
    done: StreamEvent | None


@dataclass(frozen=True)
class Recording:
    """The marks of one forward; those in a CUDA graph (`captured`) have the times of its last replay."""

    marks: list[_Marks]
    num_rows: int
    start: StreamEvent
    end: StreamEvent
    launched: float | None
    captured: bool

    def happened(self) -> bool:
        """Whether the marks have times: those of a graph that was never replayed have none."""
        try:
            return self._seconds(self.end) > 0
        except RuntimeError:
            return False

    def schedule(self) -> Schedule:
        """Waits for the device."""
        if not isinstance(self.end, float):
            self.end.synchronize()
        exchanges = [
            AllToAllSpan(
                marks.operation,
                marks.slice,
                *map(self._seconds, marks.times),
                None if marks.done is None else self._seconds(marks.done),
            )
            for marks in self.marks
        ]
        seconds = self._seconds(self.end)
        # In a graph slices have streams of their own.
        computes = _computes(exchanges, seconds, apart=self.captured)
        computes = sorted(computes, key=lambda one: one.begin)
        return Schedule(exchanges, computes, seconds, self.launched)

    def _seconds(self, mark: StreamEvent) -> float:
        if isinstance(mark, float):
            return mark - self.start
        return self.start.elapsed_time(mark) / 1e3


class _Recorded(AllToAll):
    """Another all-to-all, whose exchanges a recorder follows."""

    def __init__(self, inner: AllToAll, index: int, recorder: ScheduleRecorder):
        self.name, self.layout, self.graph = inner.name, inner.layout, inner.graph
        self.needs_equal_tokens, self.stream = inner.needs_equal_tokens, inner.stream
        self._inner, self._slice, self._recorder = inner, index, recorder

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        call = partial(self._inner.dispatch, x_TD, topk_idx_TK, topk_weights_TK)
        return self._recorder.follow("dispatch", self._slice, self._inner, call)

    def dispatch_buffer(self, num_rows: int) -> torch.Tensor | None:
        return self._inner.dispatch_buffer(num_rows)

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        call = partial(self._inner.combine, y_RD, handle)
        return self._recorder.follow("combine", self._slice, self._inner, call)

    def set_num_sms(self, num_sms: int | None) -> None:
        self._inner.set_num_sms(num_sms)

    def close(self) -> None:
        self._inner.close()


_LEADS_TO: dict[str, Any] = {"dispatch": "attention", "combine": "experts"}


def _computes(
    exchanges: list[AllToAllSpan], seconds: float, *, apart: bool
) -> Iterator[ComputeSpan]:
    """The time between exchanges, slice by slice. Slices that do not compute apart begin one after the other."""
    begin = 0.0
    for index in range(1 + max((x.slice for x in exchanges), default=0)):
        own = [x for x in exchanges if x.slice == index]
        end = begin
        for x in own:
            yield ComputeSpan(_LEADS_TO[x.operation], index, end, x.called)
            if x.asked - x.sent > NEXT_MARK_S:
                yield ComputeSpan("rest", index, x.sent, x.asked)
            end = x.arrived
        if not apart and own:
            begin = own[0].asked
    yield ComputeSpan("end", index, end, seconds)
