"""Detection of out-of-memory errors. Only torch's own allocators have an exception type for them."""

import re

import torch

# Messages of CUDA's driver and runtime, NCCL and Triton; of cuBLAS and cuDNN; of torch on CPU.
_MESSAGE = re.compile(r"out.of.memory|STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or the host had too little memory, by the error's type or its message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGE.search(str(error)) is not None


def out_of_memory_line(error: BaseException) -> str:
    """Return the line of the message about memory. CUDA adds general advice below it, NCCL its source line above it."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return next((line for line in lines if _MESSAGE.search(line)), lines[0]).rstrip(".")
