"""Whether flashinfer loads, and the modules that attention loads of it, to compile them before the first use."""

import functools
import logging
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.attention.flashinfer_units import (
    CAUSAL,
    MASKS,
    NONE,
    NOTE,
    compiled_masks,
    cut,
    in_order,
)
from kernels.host.cuda_environment import (
    add_own_programs,
    own_flashinfer_folder,
    share_compiled_kernels,
)
from kernels.host.hopper import on_hopper
from kernels.interface.attention_spec import AttentionSpec

logger = logging.getLogger(__name__)

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
    add_own_programs(os.environ)
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # libraries for another CUDA, kernels compiled for another version
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0]
    return None


def plan_quickly() -> None:
    """Let flashinfer, which is imported, take the maximum of a tensor at once in its plans.

    flashinfer 0.6 calls Python's `max` with the lengths of sequences, for which torch makes a tensor of each. That
    takes 0.7 ms for 512 sequences, twice in each plan of prompts and of decodes with drafts.
    """
    for name in ("flashinfer.prefill", "flashinfer.decode"):
        if (module := sys.modules.get(name)) is not None:
            vars(module)["max"] = _largest


def _largest(*values: Any, **options: Any) -> Any:
    """As `max`, of a tensor by torch."""
    if len(values) == 1 and isinstance(values[0], torch.Tensor):
        return values[0].max()
    return max(*values, **options)


class Wanted(NamedTuple):
    """A JitSpec of flashinfer, and the masks that attention calls it with; none if it has no unit for each mask."""

    module: Any
    masks: tuple[str, ...]


def compile_modules(dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
    """Compile the missing modules for layers of these specs, all at once. Takes no memory of the GPU.

    A process that loads a module meanwhile waits for it. Raises RuntimeError with the compiler's message.
    """
    head_dims = sorted({spec.head_dim for spec in specs})
    compile_missing([wanted for head_dim in head_dims for wanted in modules(dtype, head_dim)])


def compile_missing(found: Iterable[Wanted]) -> None:
    """Compile the modules that are not compiled yet, all at once."""
    missing = [wanted for wanted in found if not _is_compiled(wanted)]
    with ThreadPoolExecutor(max(1, len(missing))) as pool:
        list(pool.map(_compile, missing))


def _is_compiled(wanted: Wanted) -> bool:
    module, masks = wanted
    return module.is_compiled and compiled_masks(module).issuperset(masks)


def _compile(wanted: Wanted) -> None:
    """Compile a module for its masks: for all of them in other programs' folder, and where the cut module fails."""
    from filelock import FileLock

    module, masks = wanted
    with FileLock(module.lock_path, thread_local=False):  # flashinfer's own lock of the module
        if _is_compiled(wanted):
            return
        note = module.build_dir / NOTE
        if module.is_compiled:
            masks = tuple(compiled_masks(module).union(masks))
            module.jit_library_path.unlink()
        if own_flashinfer_folder(os.environ):
            try:
                _build(cut(module, masks), note, " ".join(in_order(masks)))
                return
            except RuntimeError as error:
                lines = str(error).splitlines()
                reason = next((line for line in lines if "error" in line), lines[0])
                logger.warning("%s is compiled for all masks (minutes): %s", module.name, reason)
        _build(module, note, " ".join(MASKS))


def _build(module: Any, note: Path, masks: str) -> None:
    module.write_ninja()
    note.write_text(masks)
    module.build(verbose=False, need_lock=False)


def seal_modules(cache: Path) -> int:
    """Make the compiled modules below a cache folder load at any path; return their number.

    flashinfer runs ninja before it loads a module. In a folder that was copied ninja would compile again, because paths
    and times of sources differ, so each module gets a build file with nothing to do. Intermediate files are deleted.
    """
    folders = [file.parent for file in cache.glob(f"**/cached_ops/*/*{LIBRARY}")]
    for folder in folders:
        for file in folder.iterdir():
            if file.suffix != LIBRARY and file.name != NOTE:
                file.unlink()
        (folder / "build.ninja").write_text(NOTHING_TO_BUILD)
    return len(folders)


@functools.cache
def modules(dtype: torch.dtype, head_dim: int) -> tuple[Wanted, ...]:
    """Return what `FlashInferAttention` of this dtype and head dim loads on this machine's GPU.

    Decodes run without a mask, because a row sees all of its sequence. Decodes with drafts in graphs have several rows.
    """
    from flashinfer.jit.attention import gen_batch_prefill_module

    types = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
    no_options = (0, False, False, False)  # position encoding, window, soft cap, 16-bit sums
    masks = {"fa2": (NONE, CAUSAL)} | ({"fa3": (CAUSAL,)} if on_hopper() else {})
    return tuple(
        Wanted(gen_batch_prefill_module(backend, *types, *no_options), of_backend)
        for backend, of_backend in masks.items()
    )


def latent_modules(
    dtype: torch.dtype, specs: Iterable[AttentionSpec], *, decodes: bool = True
) -> list[Wanted]:
    """Return what `FlashInferMlaAttention` loads for layers of these specs; decodes: also the module of decodes."""
    from flashinfer.jit import gen_batch_mla_module
    from flashinfer.jit.attention import gen_batch_prefill_module

    types, found = (dtype, dtype, dtype, torch.int32), []
    no_options: tuple[Any, ...] = (0, False, False, False)
    for spec in dict.fromkeys(specs):
        dims = spec.mla
        assert dims is not None
        if decodes:  # one unit
            profiler = False
            module = gen_batch_mla_module("fa3", *types, dims.rank, dims.rope_dim, profiler)
            found.append(Wanted(module, ()))
        heads = spec.head_dim, dims.value_dim
        prompts = gen_batch_prefill_module("fa3", *types, *heads, *no_options)
        # Prompts see all of their computed tokens, and the new ones before each row.
        found.append(Wanted(prompts, (NONE, CAUSAL)))
    return found
