"""Whether flashinfer loads, and the modules that attention loads of it, to compile them before the first use."""

import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kernels.attention.spec import AttentionSpec
from kernels.host.cuda_environment import share_compiled_kernels
from kernels.host.hopper import on_hopper

LIBRARY = ".so"
NOTHING_TO_BUILD = "build all: phony\ndefault all\n"


@functools.cache
def import_failure() -> str | None:
    """Return the error of `import flashinfer`, or None; None too where the package is not installed.

    The import takes 0.13 s for 0.6.6 beside torch on a CPU (without CuTe DSL). A process that uses flashinfer needs it.
    """
    if find_spec("flashinfer") is None:
        return None
    share_compiled_kernels(os.environ)  # before the import, which reads the environment once
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # libraries for another CUDA, kernels compiled for another version
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0]
    return None


def compile_modules(dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
    """Compile the missing modules for layers of these specs, all at once. Takes no memory of the GPU.

    A process that loads a module meanwhile waits for it. Raises RuntimeError with the compiler's message.
    """
    head_dims = sorted({spec.head_dim for spec in specs})
    compile_missing([module for head_dim in head_dims for module in modules(dtype, head_dim)])


def compile_missing(found: Iterable[Any]) -> None:
    """Compile the JitSpecs that are not compiled yet, all at once."""
    missing = [module for module in found if not module.is_compiled]
    with ThreadPoolExecutor(max(1, len(missing))) as pool:
        list(pool.map(lambda module: module.build(verbose=False), missing))


def seal_modules(cache: Path) -> int:
    """Make the compiled modules below a cache folder load at any path; return their number.

    flashinfer runs ninja before it loads a module. In a folder that was copied ninja would compile again, because paths
    and times of sources differ, so each module gets a build file with nothing to do. Intermediate files are deleted.
    """
    folders = [file.parent for file in cache.glob(f"**/cached_ops/*/*{LIBRARY}")]
    for folder in folders:
        for file in folder.iterdir():
            if file.suffix != LIBRARY:
                file.unlink()
        (folder / "build.ninja").write_text(NOTHING_TO_BUILD)
    return len(folders)


def modules(dtype: torch.dtype, head_dim: int) -> list[Any]:
    """Return the JitSpecs that `FlashInferAttention` of this dtype and head dim loads on this machine's GPU."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    types = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
    no_options = (0, False, False, False)  # position encoding, window, soft cap, 16-bit sums
    backends = ("fa2", "fa3") if on_hopper() else ("fa2",)
    return [gen_batch_prefill_module(backend, *types, *no_options) for backend in backends]


def latent_modules(dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> list[Any]:
    """Return the JitSpecs that `FlashInferLatentAttention` loads for layers of these specs."""
    from flashinfer.jit import gen_batch_mla_module
    from flashinfer.jit.attention import gen_batch_prefill_module

    types, found = (dtype, dtype, dtype, torch.int32), []
    for spec in dict.fromkeys(specs):
        dims = spec.latent
        assert dims is not None
        profiler, no_options = False, (0, False, False, False)
        found += [
            gen_batch_mla_module("fa3", *types, dims.rank, dims.rope_dim, profiler),
            gen_batch_prefill_module("fa3", *types, spec.head_dim, dims.value_dim, *no_options),
        ]
    return found
