"""Whether flashinfer loads, and which of its modules attention does, to compile them before anybody needs them."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch

from kernels.host.cuda_environment import share_compiled_kernels
from kernels.host.hopper import on_hopper


@functools.cache
def import_failure() -> str | None:
    """What `import flashinfer` fails of, or None; None too where there is no such package, which others look for.

    0.13 s for 0.6.6 beside torch on a CPU (without CuTe DSL), and a process that uses it pays that anyway.
    """
    if find_spec("flashinfer") is None:
        return None
    share_compiled_kernels(os.environ)  # it looks once, now
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # libraries for another CUDA, kernels compiled for another version
        said = str(error).strip().splitlines() or [type(error).__name__]
        return said[0]
    return None


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
