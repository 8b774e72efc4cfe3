"""Layout of the ranks of a group: data, tensor and expert parallelism, and hosts. Pure arithmetic, no torch.

All arithmetic on rank numbers outside the kernels is here. Knows nothing of Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kernels.routing.expert_map import ContiguousMap, ExpertMap

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The layout of one group. Ranks are numbered by (node, device).

    num_ranks     data-parallel ranks, each of which is one process
    tensor_size   processes that share the attention of one data-parallel rank
    num_nodes     hosts, each with an equal number of ranks
    """

    num_ranks: int
    num_nodes: int = 1
    tensor_size: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise ValueError(f"{self.num_ranks} ranks cannot be spread over {self.num_nodes} nodes")
        if self.tensor_size != 1:
            raise ValueError(f"tensor_size is {self.tensor_size}; only 1 is implemented")

    @property
    def expert_size(self) -> int:
        """Number of ranks that hold experts."""
        return self.num_ranks * self.tensor_size

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of each host."""
        return self.num_ranks // self.num_nodes

    @property
    def alone(self) -> bool:
        """Whether the group has one rank, and so no communication."""
        return self.num_ranks == 1

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        return self.num_nodes == 1

    def ranks(self) -> range:
        """Return all ranks."""
        return range(self.num_ranks)

    def node(self, rank: int) -> int:
        """Return the host of `rank`."""
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Return the index of `rank` among the ranks of its host, which is the index of its device."""
        return rank % self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        """Return the ranks that share the memory of host `node`."""
        start = node * self.ranks_per_node
        return range(start, start + self.ranks_per_node)

    def peers(self, rank: int) -> list[int]:
        """Return all ranks but `rank`, in order."""
        return [peer for peer in self.ranks() if peer != rank]

    def of_peers(self, rank: int, values: Sequence[T]) -> list[T]:
        """Return the entries of the peers of `rank` in `values`, which has one entry a rank."""
        return [values[peer] for peer in self.peers(rank)]

    def equal_counts(self, count: int) -> tuple[int, ...]:
        """Return `count` for every rank, as in StepPlan.num_tokens_across_dp."""
        return (count,) * self.num_ranks

    def expert_map(self, num_experts: int, redundant_slots: int = 0) -> ExpertMap:
        """Return the map of experts to ranks, of which each has redundant slots, before any load is known."""
        return ContiguousMap(num_experts, self.expert_size, redundant_slots)
