"""Where experts live: the model's logical experts, and the physical slots of ranks that hold them. Equal on every rank.

Slots are numbered rank by rank, so each rank has a contiguous range of slots, equal in all layers. Which expert a slot
holds may differ by layer; an expert may have copies on several ranks. Routers choose logical experts;
`kernels.slot_table` turns them into slots, and all-to-alls, permutations and grouped products get slots alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

STANDBY = -1
"""In place of a rank: a process that waits to become one. It holds no expert."""


class ExpertMap(ABC):
    """A map of logical experts to physical slots. Maps that are equal compare as equal.

    num_experts   logical experts of a layer
    num_ranks     ranks with slots
    """

    num_experts: int
    num_ranks: int

    @property
    @abstractmethod
    def starts(self) -> tuple[int, ...]:
        """`num_ranks + 1` offsets: rank r has the slots `starts[r] .. starts[r + 1] - 1`."""

    @abstractmethod
    def experts_of(self, rank: int, layer: int = 0) -> Sequence[int]:
        """Return the logical expert of each slot of `rank` in a layer, all different; none of STANDBY."""

    @property
    def num_slots(self) -> int:
        """Slots of all ranks."""
        return self.starts[-1]

    @property
    def is_identity(self) -> bool:
        """Whether slot i holds expert i in all layers."""
        return False

    def slots_of(self, rank: int) -> range:
        """Return the slots of `rank`; none of STANDBY."""
        if rank == STANDBY:
            return range(0)
        starts = self.starts
        return range(starts[rank], starts[rank + 1])

    def experts(self, layer: int = 0) -> tuple[int, ...]:
        """Return the logical expert of every slot in a layer."""
        return tuple(
            expert for rank in range(self.num_ranks) for expert in self.experts_of(rank, layer)
        )


@dataclass(frozen=True)
class ContiguousMap(ExpertMap):
    """Ranges of experts over ranks, equal in all layers; the first `num_experts % num_ranks` ranks hold one more.

    A rank may hold no expert when there are more ranks than experts.

    spare   slots of each rank beside; they hold the experts that follow the rank's range, around the end
    """

    num_experts: int
    num_ranks: int
    spare: int = 0

    @property
    def starts(self) -> tuple[int, ...]:
        """See ExpertMap."""
        return tuple(start + rank * self.spare for rank, start in enumerate(self._ranges))

    @property
    def _ranges(self) -> tuple[int, ...]:
        share, extra = divmod(self.num_experts, self.num_ranks)
        sizes = [share + (rank < extra) for rank in range(self.num_ranks)]
        return tuple(accumulate(sizes, initial=0))

    @property
    def is_identity(self) -> bool:
        """See ExpertMap."""
        return not self.spare

    def experts_of(self, rank: int, layer: int = 0) -> Sequence[int]:
        """See ExpertMap."""
        if rank == STANDBY:
            return range(0)
        first, end = self._ranges[rank : rank + 2]
        if not self.spare:
            return range(first, end)
        return [expert % self.num_experts for expert in range(first, end + self.spare)]


@dataclass(frozen=True)
class PlacedMap(ExpertMap):
    """Any map.

    bounds   `starts`
    layers   of each layer of the model, the logical expert of every slot
    """

    num_experts: int
    bounds: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for number, slots in enumerate(self.layers):
            problem = self._problem(slots)
            if problem is not None:
                raise ValueError(f"layer {number}: {problem}")

    def _problem(self, slots: tuple[int, ...]) -> str | None:
        """Return why a layer is no map of all experts, or None."""
        if len(slots) != self.num_slots:
            return f"it has {len(slots)} slots, expected {self.num_slots}"
        missing = set(range(self.num_experts)).symmetric_difference(slots)
        if missing:
            return f"experts {sorted(missing)} have no slot, or are none of 0 to {self.num_experts - 1}"
        for rank, (start, end) in enumerate(pairwise(self.starts)):
            if len(set(slots[start:end])) < end - start:
                return f"rank {rank} holds an expert twice: {list(slots[start:end])}"
        return None

    @property
    def num_ranks(self) -> int:  # type: ignore[override]
        """See ExpertMap."""
        return len(self.bounds) - 1

    @property
    def starts(self) -> tuple[int, ...]:
        """See ExpertMap."""
        return self.bounds

    def experts_of(self, rank: int, layer: int = 0) -> tuple[int, ...]:
        """See ExpertMap."""
        slots = self.slots_of(rank)
        return self.layers[layer][slots.start : slots.stop]


def kept_runs(
    before: Sequence[int], after: Sequence[int], kept: Collection[int]
) -> Iterator[tuple[slice, slice]]:
    """Yield the places of `kept` experts in `after` and in `before`, neighbours in both as one slice."""
    place = {expert: at for at, expert in enumerate(before)}
    yield from runs([(to, place[expert]) for to, expert in enumerate(after) if expert in kept])


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of places, those that are neighbours in both as one pair of slices."""
    first = 0
    while first < len(pairs):
        (to, at), count = pairs[first], 1
        while list(pairs[first + count : first + count + 1]) == [(to + count, at + count)]:
            count += 1
        yield slice(to, to + count), slice(at, at + count)
        first += count
