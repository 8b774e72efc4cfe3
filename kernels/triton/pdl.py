"""Programmatic dependent launch: the programs of a kernel start while the kernel before it still runs.

A decode of few rows is a chain of kernels of 2 to 6 us. Without this, each of them starts 1 to 2 us after the end of
the kernel before. A kernel of such a chain calls `begin` before it reads what the kernel before wrote, and before it
writes anything. Only what no kernel of a step writes before it may be read earlier: constant weights, and states of
sequences in the kernel that alone writes them. Steps begin and end with kernels that start as usual. Hopper GPUs and
newer. Knows nothing of the work of kernels.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pending import can_yield_ubatch

# Rows of a step of all ranks; with more, kernels are long beside the gaps between them.
MOST_ROWS = 64
MIN_CAPABILITY = (9, 0)


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel's programs start, then wait for all that earlier kernels wrote. Each program calls it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def begin_last(PDL: tl.constexpr):
    """As `begin`, in a kernel before one of a library that starts early: that one starts at this one's end.

    A program of flashinfer without work ends without waiting. If all do, the kernel behind it would not wait either.
    """
    if PDL:
        gdc_wait()


def dependent_launch(num_rows: int = 0, *, early: bool = True) -> dict[str, Any]:
    """Return the arguments of a kernel that calls `begin`.

    Where the number of rows also chooses another constant of the kernel, that constant must choose this one too: a
    warm-up meets one change of form between two of its sizes.

    num_rows   that the kernel takes
    early      False: the kernel starts as usual
    """
    on = early and num_rows <= MOST_ROWS and starts_early()
    return {"PDL": on, "launch_pdl": on}


def starts_early() -> bool:
    """Return whether kernels may start before the end of the one before. In ubatches, on several streams, none may."""
    return supported() and not can_yield_ubatch()


@functools.cache
def supported() -> bool:
    """Return whether this GPU starts kernels early."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY
