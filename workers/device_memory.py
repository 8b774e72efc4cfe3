"""Says what was asked for, and what to lower, when memory does not suffice at start. Knows no model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

GIGABYTE = 1e9
_STEPS = "Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
REMEDIES = {
    "the weights": "More ranks (cluster.ranks) hold fewer experts each; a narrower model.dtype, or "
    "kernels.grouped_gemm: deepgemm_fp8, takes less",
    "the exchange's buffers": _STEPS,
    "a step": _STEPS,
    "the KV cache": "Lower cache.num_blocks, cache.memory_fraction (GPU) or cache.cpu_memory_gib (CPU)",
    "CUDA graphs": f"{_STEPS}, or set scheduler.cuda_graphs to false",
    "microbatches": f"{_STEPS}, or set overlap.mode to off",
}


class OutOfDeviceMemoryError(ValueError):
    """The configuration takes more memory than there is; the message names what did not fit and what to lower."""


@contextmanager
def memory_for(what: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of torch and Python into OutOfDeviceMemoryError: `what`, a key of REMEDIES, did not fit.

    num_bytes   how large it is, where that is known
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        on_cpu = isinstance(error, MemoryError)
        where, why = ("this machine", str(error)) if on_cpu else ("the GPU", _memory_of(error))
        size = "" if num_bytes is None else f" ({num_bytes / GIGABYTE:,.1f} GB)"
        raise OutOfDeviceMemoryError(
            f"{where} has no room for {what}{size}: {why}. {REMEDIES[what]}"
        ) from error


def _memory_of(error: torch.OutOfMemoryError) -> str:
    """How much there is, or torch's own first sentence where the device cannot be asked."""
    if not torch.cuda.is_available():
        return str(error).partition(". ")[0]
    free, total = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_allocated()
    others = total - free - torch.cuda.memory_reserved()
    return (
        f"of {total / GIGABYTE:,.1f} GB this rank holds {ours / GIGABYTE:,.1f} GB already, other programs and CUDA "
        f"{others / GIGABYTE:,.1f} GB"
    )
