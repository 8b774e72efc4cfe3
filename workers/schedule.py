"""A forward as it ran on one rank: which slice exchanged and computed when. Plain data."""

from dataclasses import dataclass
from typing import Literal

Operation = Literal["dispatch", "combine"]


@dataclass(frozen=True)
class Exchange:
    """One exchange of one slice, in seconds since the recording began.

    called, sent       when it was started, and when the compute side could go on
    awaited, arrived   when the slice asked for the result, and had it
    """

    operation: Operation
    slice: int
    called: float
    sent: float
    awaited: float
    arrived: float

    @property
    def exposed(self) -> float:
        """Seconds in which nothing was computed for its sake."""
        return self.sent - self.called + self.arrived - self.awaited


@dataclass(frozen=True)
class Compute:
    """Compute of one slice between two exchanges: `attention` leads to a dispatch, `experts` to a combine."""

    name: Literal["attention", "experts", "end"]
    slice: int
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A forward of one rank: its exchanges in the order they were called, its compute in the order it ran."""

    exchanges: list[Exchange]
    computes: list[Compute]
    seconds: float

    @property
    def exposed(self) -> float:
        """Seconds that communication took from compute."""
        return sum(exchange.exposed for exchange in self.exchanges)

    def order(self) -> list[tuple[str, int]]:
        """(operation, slice) as the exchanges were called."""
        return [(exchange.operation, exchange.slice) for exchange in self.exchanges]


def hidden_share(plain: Schedule, microbatched: Schedule) -> float:
    """How much of the time that communication costs the plain form is gone in the microbatched one; 1 = all."""
    return 1 - microbatched.exposed / plain.exposed if plain.exposed else 0.0


@dataclass(frozen=True)
class RankTrace:
    """One rank's step of `num_tokens`, whole and in slices, over the exchange named."""

    rank: int
    num_tokens: int
    all2all: str
    plain: Schedule
    microbatched: Schedule
