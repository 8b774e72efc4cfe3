"""Says what was asked for, and what to lower, when a GPU's memory does not suffice at start. Knows no model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

GIGABYTE = 1e9
LOWER_STEPS = "Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
LOWER_GRAPHS = f"{LOWER_STEPS}, or set scheduler.cuda_graphs to false"


class OutOfDeviceMemoryError(ValueError):
    """A GPU is too small for the configuration; the message names what did not fit and what to lower."""


@contextmanager
def memory_for(what: str, remedy: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn torch's error into OutOfDeviceMemoryError: `what` (of `num_bytes`, where known) did not fit, do `remedy`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = "" if num_bytes is None else f" ({num_bytes / GIGABYTE:,.1f} GB)"
        raise OutOfDeviceMemoryError(
            f"the GPU has no room for {what}{size}: {_memory_of(error)}. {remedy}"
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
