"""Memory of a GPU: errors of too little at start, with the settings to lower, and what an epoch leaves behind.

Knows nothing of models.
"""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.host.out_of_memory import is_out_of_memory, out_of_memory_line

MEGABYTE, GIGABYTE = 10**6, 10**9
_STEPS = "Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
_MORE_RANKS = "More ranks (cluster.ranks) hold fewer experts each"
REMEDIES = {
    "the ranks' group": "Other programs hold the memory: end them, or name free GPUs in CUDA_VISIBLE_DEVICES",
    "the all-to-all's buffers": _STEPS,
    "the weights": f"{_MORE_RANKS}; `phalanx check` on a GPU names settings that fit",
    "attention's workspace": f"{_MORE_RANKS}; kernels.attention: sdpa has none",
    "a step": _STEPS,
    "the KV cache": "Lower cache.num_blocks, cache.memory_fraction (GPU) or cache.cpu_memory_gib (CPU)",
    "the states of linear attention": "Lower scheduler.max_num_seqs or cache.state_snapshots",
    "CUDA graphs": f"{_STEPS}, or set scheduler.cuda_graphs to false",
    "ubatches": f"{_STEPS}, or set overlap.mode to off",
}


class OutOfDeviceMemoryError(ValueError):
    """The configuration needs more memory than there is; the message names the allocation and the settings to lower."""


@contextmanager
def memory_for(what: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of any library into OutOfDeviceMemoryError: `what`, a key of REMEDIES, did not fit.

    num_bytes   size of `what`; None if it is not computed before
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        on_host = isinstance(error, MemoryError) or "CPUAllocator" in str(error)
        where, held = ("this machine", "") if on_host else ("the GPU", _memory_by_owner())
        how_large = "" if num_bytes is None else f" ({size(num_bytes)})"
        raise OutOfDeviceMemoryError(
            f"{where} has no room for {what}{how_large}: {_allocation(error)}{held}. {REMEDIES[what]}"
        ) from error


def free_unused(device: torch.device) -> None:
    """Free what reference cycles hold, and on a GPU all memory of torch that no tensor uses. No graph may be left.

    Engines, and exchanges that an error left unfinished, are cycles: they would keep threads of process groups, files
    and shared memory until Python collects its oldest generation.
    torch keeps a workspace of cuBLAS (32 MiB on Hopper) for each pair of a host thread and a stream, and each epoch has
    new streams. A workspace that a capture has allocated lies in the memory pool of the graph, and keeps it.
    """
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _allocation(error: Exception) -> str:
    """Return the bytes that torch tried to allocate, if the message has them; else the line about memory."""
    if tried := re.search(r"[Tt]ried to allocate ([\d.,]+ \w+)", str(error)):
        return f"torch tried to allocate {tried[1]}"
    return out_of_memory_line(error)


def _memory_by_owner() -> str:
    """Return the GPU memory by owner; empty if CUDA has too little memory to report it."""
    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):
        return ""
    ours = torch.cuda.memory_allocated()
    others = total - free - torch.cuda.memory_reserved()
    return (
        f"; of {size(total)} this rank holds {size(ours)} already, other programs and CUDA "
        f"{size(others)}"
    )


def size(num_bytes: int) -> str:
    """Return the size in GB or MB, as text for messages."""
    if num_bytes >= GIGABYTE:
        return f"{num_bytes / GIGABYTE:,.1f} GB"
    return f"{num_bytes / MEGABYTE:,.1f} MB"
