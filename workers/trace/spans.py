"""A forward as it ran on one rank: when each ubatch computed and when its all-to-alls were in flight. Plain data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from workers.trace import hidden

Operation = Literal["dispatch", "combine"]
Interval = tuple[float, float]  # begin and end, in seconds


@dataclass(frozen=True)
class AllToAllSpan:
    """One all-to-all of one ubatch, in seconds since the recording began.

    called, sent       begin of the call, and when the compute side could continue
    idle               when the ubatch had nothing else to do
    awaited, arrived   when it was the ubatch's turn again, and when it had the result
    done               when the rows had arrived; None where that cannot be recorded
    """

    operation: Operation
    ubatch: int
    called: float
    sent: float
    idle: float
    awaited: float
    arrived: float
    done: float | None = None

    @property
    def end(self) -> float:
        """The end of the transfer: `done`, or `arrived` where `done` is unknown."""
        if self.done is None:
            return self.arrived
        return max(self.sent, min(self.done, self.arrived))

    @property
    def in_flight(self) -> Interval:
        """When rows travel while the rank is free to compute."""
        return self.sent, max(self.sent, self.end)

    @property
    def waits(self) -> tuple[Interval, Interval]:
        """When the ubatch stands still for this all-to-all."""
        return (self.called, self.sent), (self.awaited, self.arrived)


@dataclass(frozen=True)
class ComputeSpan:
    """Compute of one ubatch between two all-to-alls: `attention` precedes a dispatch, `experts` a combine.

    `rest` runs beside the ubatch's own all-to-all. In a CUDA graph ubatches compute side by side.
    """

    name: Literal["attention", "experts", "rest", "end"]
    ubatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class StepTrace:
    """The spans of one forward on one rank: all-to-alls in the order of their calls, compute in the order it began.

    launched   when the host had launched all of it on the GPU, in seconds; near `seconds`, the GPU waited for the
               host. None on a CPU and for CUDA graphs
    """

    all2alls: list[AllToAllSpan]
    computes: list[ComputeSpan]
    seconds: float
    launched: float | None = None

    @property
    def exposed(self) -> float:
        """Seconds in which a ubatch waited for an all-to-all and no ubatch computed."""
        waits = list(union(wait for span in self.all2alls for wait in span.waits))
        return sum(end - begin for begin, end in waits) - overlapping(waits, self._computing())

    @property
    def covered(self) -> float:
        """Seconds in which the rank computed while an all-to-all was in flight."""
        in_flight = list(union(span.in_flight for span in self.all2alls))
        return overlapping(in_flight, self._computing())

    @property
    def covered_share(self) -> float:
        """`hidden.covered_share` of this forward, 0 to 1; 0 without an all-to-all."""
        return hidden.covered_share(self.covered, self.exposed)

    def _computing(self) -> list[Interval]:
        """When any ubatch computed."""
        return list(union((compute.begin, compute.end) for compute in self.computes))

    def order(self) -> list[tuple[str, int]]:
        """Return (operation, ubatch) of the all-to-alls in the order of their calls."""
        return [(span.operation, span.ubatch) for span in self.all2alls]

    def num_layers(self) -> int:
        """Return the number of layers that have all-to-alls."""
        return sum(x.operation == "combine" and x.ubatch == 0 for x in self.all2alls)

    def interval_of(self, first: int, count: int) -> Interval:
        """Return from where ubatch 0 enters layer `first` to where it leaves the `count`-th layer from there."""
        ends = [x.arrived for x in self.all2alls if x.ubatch == 0 and x.operation == "combine"]
        return ends[first - 1] if first else 0.0, ends[first + count - 1]


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Return the same time as intervals that are in order and disjoint."""
    last: Interval | None = None
    for begin, end in sorted(intervals):
        if last is None or begin > last[1]:
            if last is not None:
                yield last
            last = begin, end
        else:
            last = last[0], max(last[1], end)
    if last is not None:
        yield last


def overlapping(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the seconds that lie in an interval of both; each side is in order and disjoint."""
    seconds, others = 0.0, list(second)
    at = 0
    for begin, end in first:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        for other_begin, other_end in others[at:]:
            if other_begin >= end:
                break
            seconds += min(end, other_end) - max(begin, other_begin)
    return seconds


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's step of `num_tokens` over the all-to-all named, whole and in ubatches.

    unrecorded   seconds of the same step without recording, whole and in ubatches
    """

    rank: int
    num_tokens: int
    all2all: str
    plain: StepTrace
    ubatched: StepTrace
    unrecorded: tuple[float, float]

    @property
    def saved_share(self) -> float | None:
        """`hidden.saved_share`, where an all-to-all adds the seconds that the rank waits for it without computing."""
        return hidden.saved_share(self.ubatched.exposed, self.plain.exposed)
