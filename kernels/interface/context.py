"""The inputs that the backends of one rank are built from. Knows nothing of particular backends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from kernels.host.links import HostNetwork
from kernels.host.shm import SharedMemoryGroup
from kernels.interface.backend import BackendShape
from kernels.interface.shared_reads import SharedReads
from kernels.routing.expert_map import ExpertMap
from kernels.routing.permute import Permutation


@dataclass(frozen=True, kw_only=True)
class BackendContext:
    """One rank's part of a group.

    shape            what the backends were chosen for; max_num_tokens bounds a rank's rows of one dispatch
    group            process group; None where the all-to-all needs none
    shared_memory    memory that the ranks of this host share, with one channel for each of
                     `Selection.shared_memory_slots`; None if the all-to-all needs no channels
    network          this host's address for the ranks of other hosts; None for a rank alone
    gather           returns a JSON value of every rank, in rank order; None for a rank alone
    block_size       tokens of a block of the KV cache
    row_alignment    on GPUs: the first permuted row of each expert must be a multiple of it; from the grouped GEMM
    unaligned_rows   up to so many rows of an expert on average need no alignment; from the grouped GEMM
    masked_fp8       whether masked rows come in e4m3 with scales; from the grouped GEMM
    shared_reads     counts the leading blocks that attention reads once for several decodes, where it can and where
                     that pays; None: each decode reads its whole sequence
    """

    shape: BackendShape
    device: torch.device
    rank: int
    group: dist.ProcessGroup | None
    shared_memory: SharedMemoryGroup | None
    network: HostNetwork | None = None
    gather: Callable[[Any], Sequence[Any]] | None = None
    expert_map: ExpertMap
    block_size: int
    row_alignment: int = 1
    unaligned_rows: float = 0.0
    masked_fp8: bool = False
    shared_reads: SharedReads | None = None

    @property
    def local_slots(self) -> range:
        """The experts of this rank, as slots of `expert_map`."""
        return self.expert_map.slots_of(self.rank)

    def process_group(self, name: str) -> dist.ProcessGroup:
        """Return `group` for the all-to-all `name`, which needs one."""
        assert self.group is not None, f"{name} needs a process group"
        return self.group

    def permutation(self, dtype: torch.dtype, slots: range | None = None) -> Permutation:
        """Return the permutation into the order of `slots`, else of this rank's slots, for ids of `dtype`."""
        return Permutation(
            self.local_slots if slots is None else slots,
            num_experts=self.expert_map.num_slots,
            device=self.device,
            dtype=dtype,
            alignment=self.row_alignment,
            unaligned_rows=self.unaligned_rows,
            adapters=self.shape.expert_adapters,
        )

    def with_max_num_tokens(self, max_num_tokens: int) -> "BackendContext":
        """Return the same context for steps of at most `max_num_tokens` rows of a rank."""
        return replace(self, shape=replace(self.shape, max_num_tokens=max_num_tokens))
