"""A forward as it ran on one rank: which slice exchanged and computed when. Plain data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Operation = Literal["dispatch", "combine"]
Span = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class AllToAllSpan:
    """One exchange of one slice, in seconds since the recording began.

    called, sent       when it was started, and when the compute side could go on
    asked              when the slice had nothing else to do
    awaited, arrived   when it was its turn again, and when it had the result
    done               when the rows were there; None where that cannot be seen
    """

    operation: Operation
    slice: int
    called: float
    sent: float
    asked: float
    awaited: float
    arrived: float
    done: float | None = None

    @property
    def in_flight(self) -> Span:
        """While rows travel beside whatever the rank does: until `done`, or where that is unknown until arrived."""
        done = self.arrived if self.done is None else min(self.done, self.arrived)
        return self.sent, max(self.sent, done)

    @property
    def waits(self) -> tuple[Span, Span]:
        """When its slice stood still for its sake."""
        return (self.called, self.sent), (self.awaited, self.arrived)


@dataclass(frozen=True)
class ComputeSpan:
    """ComputeSpan of one slice between two exchanges: `attention` leads to a dispatch, `experts` to a combine.

    `rest` is what it does beside its own exchange. In a CUDA graph slices compute side by side.
    """

    name: Literal["attention", "experts", "rest", "end"]
    slice: int
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A forward of one rank: its exchanges in the order they were called, its compute in the order it began.

    launched   when the host had given all of it to the GPU; near `seconds`, the GPU waited for it. None without one
    """

    exchanges: list[AllToAllSpan]
    computes: list[ComputeSpan]
    seconds: float
    launched: float | None = None

    @property
    def exposed(self) -> float:
        """Seconds in which a slice stood still for an exchange and no other computed."""
        waits = list(union(wait for exchange in self.exchanges for wait in exchange.waits))
        return sum(end - begin for begin, end in waits) - overlapping(waits, self._computing())

    @property
    def hidden(self) -> float:
        """Seconds in which the rank computed while an exchange was under way."""
        in_flight = list(union(exchange.in_flight for exchange in self.exchanges))
        return overlapping(in_flight, self._computing())

    def _computing(self) -> list[Span]:
        """When any slice computed."""
        return list(union((compute.begin, compute.end) for compute in self.computes))

    @property
    def hidden_share(self) -> float:
        """Of the time in which it waited for an exchange or computed beside one, the share that it computed; 0 to 1."""
        total = self.exposed + self.hidden
        return self.hidden / total if total else 0.0

    def order(self) -> list[tuple[str, int]]:
        """(operation, slice) as the exchanges were called."""
        return [(exchange.operation, exchange.slice) for exchange in self.exchanges]

    def num_layers(self) -> int:
        """Layers with an exchange each way."""
        return sum(x.operation == "combine" and x.slice == 0 for x in self.exchanges)

    def span_of(self, first: int, count: int) -> Span:
        """From where slice 0 enters layer `first` to where it leaves the `count`-th from there."""
        ends = [x.arrived for x in self.exchanges if x.slice == 0 and x.operation == "combine"]
        return ends[first - 1] if first else 0.0, ends[first + count - 1]


def union(spans: Iterable[Span]) -> Iterator[Span]:
    """The same time in spans that are in order and apart."""
    last: Span | None = None
    for begin, end in sorted(spans):
        if last is None or begin > last[1]:
            if last is not None:
                yield last
            last = begin, end
        else:
            last = last[0], max(last[1], end)
    if last is not None:
        yield last


def overlapping(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Seconds that are in a span of both; the spans of each are in order and apart."""
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


@dataclass(frozen=True)
class RankTrace:
    """One rank's step of `num_tokens`, whole and in slices, over the exchange named.

    unrecorded   seconds of such a step, whole and in slices, as the engine runs it: without marks
    """

    rank: int
    num_tokens: int
    all2all: str
    plain: Schedule
    ubatched: Schedule
    unrecorded: tuple[float, float]
