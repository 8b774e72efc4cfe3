"""The placement of experts on ranks. Pure arithmetic, equal on every rank."""

from dataclasses import dataclass
from itertools import accumulate

STANDBY = -1
"""In place of a rank: a process that waits to become one. It holds no expert."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Contiguous ranges of experts over ranks; the first `num_experts % num_ranks` ranks hold one more.

    A rank may hold no expert when there are more ranks than experts.
    """

    num_experts: int
    num_ranks: int

    @property
    def starts(self) -> tuple[int, ...]:
        """`num_ranks + 1` offsets: rank r holds experts `starts[r] .. starts[r + 1] - 1`."""
        share, extra = divmod(self.num_experts, self.num_ranks)
        sizes = [share + (rank < extra) for rank in range(self.num_ranks)]
        return tuple(accumulate(sizes, initial=0))

    def local_experts(self, rank: int) -> range:
        """Return the experts that `rank` holds; none of STANDBY."""
        if rank == STANDBY:
            return range(0)
        starts = self.starts
        return range(starts[rank], starts[rank + 1])
