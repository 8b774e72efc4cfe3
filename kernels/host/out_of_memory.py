"""Which errors mean that memory did not suffice. Only torch's own allocators have a type for it."""

import re

import torch

# CUDA's driver and runtime, NCCL and Triton; cuBLAS and cuDNN; torch on CPU.
_SAID = re.compile(r"out.of.memory|STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host had too little memory, by the error's type or by its words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def line_that_says_so(error: BaseException) -> str:
    """The one line that matters: CUDA adds general advice below it, NCCL begins with the place in its source."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return next((line for line in lines if _SAID.search(line)), lines[0]).rstrip(".")
