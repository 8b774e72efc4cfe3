"""Where experts live: the model's logical experts, and the physical slots of ranks that hold them. Equal on every rank.

Slots are numbered rank by rank, so each rank has a contiguous range of slots under any map. Routers choose logical
experts; all-to-alls, permutations and grouped products get slots alone.

T tokens, K experts per token.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
    def experts_of(self, rank: int) -> Sequence[int]:
        """Return the logical expert of each slot of `rank`, all different; none of STANDBY."""

    @abstractmethod
    def to_slots(self, topk_idx_TK: "torch.Tensor") -> "torch.Tensor":
        """Return slots int64 [T, K] of logical experts int64 [T, K], on their device; -1 stays -1.

        A captured graph holds this call: tensors that it reads keep their addresses.
        """

    @property
    def num_slots(self) -> int:
        """Slots of all ranks."""
        return self.starts[-1]

    def slots_of(self, rank: int) -> range:
        """Return the slots of `rank`; none of STANDBY."""
        if rank == STANDBY:
            return range(0)
        starts = self.starts
        return range(starts[rank], starts[rank + 1])


@dataclass(frozen=True)
class ContiguousMap(ExpertMap):
    """Slot i holds expert i: ranges of experts over ranks; the first `num_experts % num_ranks` ranks hold one more.

    A rank may hold no expert when there are more ranks than experts.
    """

    num_experts: int
    num_ranks: int

    @property
    def starts(self) -> tuple[int, ...]:
        """See ExpertMap."""
        share, extra = divmod(self.num_experts, self.num_ranks)
        sizes = [share + (rank < extra) for rank in range(self.num_ranks)]
        return tuple(accumulate(sizes, initial=0))

    def experts_of(self, rank: int) -> range:
        """See ExpertMap."""
        return self.slots_of(rank)

    def to_slots(self, topk_idx_TK: "torch.Tensor") -> "torch.Tensor":
        """Return `topk_idx_TK` itself."""
        return topk_idx_TK


def kept_runs(
    before: Sequence[int], after: Sequence[int], kept: Collection[int]
) -> Iterator[tuple[slice, slice]]:
    """Yield the places of `kept` experts in `after` and in `before`, neighbours in both as one slice."""
    place = {expert: at for at, expert in enumerate(before)}
    moves = [(to, place[expert]) for to, expert in enumerate(after) if expert in kept]
    while moves:
        to, at = moves[0]
        count = 1
        while moves[count : count + 1] == [(to + count, at + count)]:
            count += 1
        yield slice(to, to + count), slice(at, at + count)
        moves = moves[count:]
