"""What a forward did when: its exchanges and the compute between them, slice by slice. Free where none is made.

A recorder wraps the all-to-alls of the kernels that a forward is run with. Marks lie on the thread that computes, or on
a GPU on its compute stream; what passes between two marks of exchanges is compute.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.pending import Pending
from kernels.select import Kernels
from workers.schedule import Compute, Exchange, Operation, Schedule

Mark = float | torch.cuda.Event


class ScheduleRecorder:
    """Records forwards that run with what `kernels` returned, one between `start` and `finish` at a time."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._marks: list[_Marks] = []
        self._start: Mark = 0.0

    def kernels(self, kernels: Kernels, index: int) -> Kernels:
        """The same, whose exchanges are recorded as those of slice `index`."""
        return replace(kernels, all2all=_Recorded(kernels.all2all, index, self._marks, self._mark))

    def start(self) -> None:
        """Forget what was recorded; times are counted from here."""
        self._marks.clear()
        self._start = self._mark()

    def finish(self) -> Schedule:
        """What happened since `start`; on CUDA this waits for the device."""
        end = self._mark()
        if self._on_cuda:
            end.synchronize()
        exchanges = [
            Exchange(marks.operation, marks.slice, *map(self._seconds, marks.times))
            for marks in self._marks
        ]
        seconds = self._seconds(end)
        return Schedule(exchanges, list(_computes(exchanges, seconds)), seconds)

    def _mark(self) -> Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark - self._start
        return self._start.elapsed_time(mark) / 1e3


@dataclass
class _Marks:
    """An exchange under way, its times in the order of Exchange's fields."""

    operation: Operation
    slice: int
    times: list[Mark]


class _Recorded(AllToAll):
    """Another all-to-all, with marks around what it does."""

    def __init__(self, inner: AllToAll, index: int, record: list[_Marks], mark: Callable[[], Mark]):
        self.name, self.layout = inner.name, inner.layout
        self.needs_equal_tokens, self.stream = inner.needs_equal_tokens, inner.stream
        self._inner, self._slice = inner, index
        self._record, self._mark = record, mark

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        called = self._mark()
        pending = self._inner.dispatch(x_TD, topk_idx_TK, topk_weights_TK)
        return self._follow("dispatch", called, pending)

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        called = self._mark()
        return self._follow("combine", called, self._inner.combine(y_RD, handle))

    def set_num_sms(self, num_sms: int | None) -> None:
        self._inner.set_num_sms(num_sms)

    def close(self) -> None:
        self._inner.close()

    def _follow(self, operation: Operation, called: Mark, pending: Pending) -> Pending:
        marks = _Marks(operation, self._slice, [called, self._mark()])
        self._record.append(marks)

        def finish() -> Any:
            marks.times.append(self._mark())
            result = pending.result()
            marks.times.append(self._mark())
            return result

        return Pending(finish)


def _computes(exchanges: list[Exchange], seconds: float) -> Iterator[Compute]:
    """The time between exchanges: whoever comes next to one has computed until then."""
    busy = [(x.called, x.sent, x.slice, _LEADS_TO[x.operation]) for x in exchanges]
    busy += [(x.awaited, x.arrived, x.slice, "end") for x in exchanges]
    last = exchanges[-1].slice if exchanges else 0
    ordered = [(0.0, 0.0, 0, "end"), *sorted(busy), (seconds, seconds, last, "end")]
    for (_, begin, _, _), (end, _, index, name) in pairwise(ordered):
        if end > begin:
            yield Compute(name, index, begin, end)


_LEADS_TO = {"dispatch": "attention", "combine": "experts"}
