"""Which of flashinfer's modules attention loads, to compile them before anybody needs them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kernels.hopper import on_hopper


def compile_modules(dtype: torch.dtype, head_dim: int) -> None:
    """Compile them side by side, and none that is there already. Takes no memory of the GPU.

    A process that loads a module meanwhile waits for it. Raises RuntimeError with the compiler's words.
    """
    missing = [module for module in modules(dtype, head_dim) if not module.is_compiled]
    with ThreadPoolExecutor(max(1, len(missing))) as pool:
        list(pool.map(lambda module: module.build(verbose=False), missing))


def modules(dtype: torch.dtype, head_dim: int) -> list[Any]:
    """What `FlashInferAttention` of this dtype and head dim loads on this machine's GPU, as flashinfer's JitSpec."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    types = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
    no_options = (0, False, False, False)  # position encoding, window, soft cap, 16-bit sums
    backends = ("fa2", "fa3") if on_hopper() else ("fa2",)
    return [gen_batch_prefill_module(backend, *types, *no_options) for backend in backends]
