"""GPU memory of each rank of a host, mapped by all of its ranks: torch's symmetric memory, without multicast.

Knows nothing of the content.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from kernels.host.out_of_memory import is_out_of_memory

HEADER_BYTES = 4096  # signal words of the ranks
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
NEEDED_TORCH = "2.11"  # as in pyproject.toml

_num_meetings = 0  # of this process, in any group


class PeerMemoryError(RuntimeError):
    """The ranks' GPUs cannot map each other's memory, or have too little."""


def peer_memory_unavailable() -> str | None:
    """Return why the GPUs that this process sees cannot share memory, or None. Ranks may see one GPU each."""
    try:
        from torch.distributed._symmetric_memory import rendezvous  # noqa: F401
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory, {NEEDED_TORCH} or newer is needed: {error}"
    devices = range(torch.cuda.device_count())
    for device in devices:
        for peer in devices:
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"GPU {device} cannot access the memory of GPU {peer}"
    return None


class PeerMemory:
    """A header of zeros and `num_bytes` on each rank. Building it is collective.

    local     uint8 [HEADER_BYTES + num_bytes], the memory of this rank
    bases_r   int64 addresses of all ranks' memory in this process, on the device
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int):
        from torch.distributed import _symmetric_memory as symm_mem

        self.rank, self.num_ranks = group.rank(), group.size()
        assert 16 * self.num_ranks <= HEADER_BYTES, self.num_ranks
        assert os.environ.get(NO_MULTICAST) == "1", f"{NO_MULTICAST} must be 1"
        # torch takes the device 0 of ranks that see one GPU each for the same GPU.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        shape = (HEADER_BYTES + num_bytes,)
        try:
            self.local = symm_mem._SymmetricMemory.empty_strided_p2p(  # type: ignore[attr-defined]
                shape, (1,), torch.uint8, device
            ).zero_()
            torch.cuda.synchronize(device)  # before any rank can write here
            _catch_up(group, device)
            self._handle = _meet(self.local, group)
        except RuntimeError as error:
            raise PeerMemoryError(
                f"rank {self.rank} cannot share {shape[0]} bytes of {device} with the ranks of its host "
                f"({error}); {_advice(error)}"
            ) from error
        self.bases_r = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._peers: list[torch.Tensor] = [
            self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(self.num_ranks)
        ]

    def of(self, rank: int) -> torch.Tensor:
        """Return the memory of `rank`, uint8. Copies between ranks run on copy engines, without an SM."""
        return self._peers[rank]

    def address(self, rank: int, offset: int) -> int:
        """Return the address of byte `offset` of the memory of `rank` in this process."""
        return int(self._handle.buffer_ptrs[rank]) + offset


def _meet(memory: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Map `memory` of all ranks of `group` into this process. Collective."""
    from torch.distributed import _symmetric_memory as symm_mem

    global _num_meetings
    _num_meetings += 1  # also of a meeting that fails, because torch counts it
    return symm_mem.rendezvous(memory, group)


def _catch_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Repeat a rendezvous of this process alone until its count equals the count of each rank of `group`. Collective.

    torch counts the rendezvous of a process, and two processes with different counts wait for each other without end
    (pytorch/pytorch#196082). A living rank has a higher count than the new process of a dead rank.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([_num_meetings]), group)
    most = int(max(counts))
    if _num_meetings == most:
        return
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    while _num_meetings < most:
        _meet(symm_mem._SymmetricMemory.empty_strided_p2p((1,), (1,), torch.uint8, device), alone)  # type: ignore[attr-defined]
    dist.destroy_process_group(alone)


def _advice(error: RuntimeError) -> str:
    if is_out_of_memory(error):
        return "a lower scheduler.max_num_batched_tokens needs fewer"
    return "kernels.all2all: allgather needs no shared memory"
