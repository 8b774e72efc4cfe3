"""Cuts flashinfer's attention modules to the masks that layers use, because a server's start waits for the compiler.

flashinfer generates a unit for each mask, with pages and without, and a unit that chooses among all masks. A cut module
has the units of its masks, and a choice among these: a call with another mask raises. A note beside a cut module
names its masks, because a server with further masks compiles it again.
"""

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

# The names of flashinfer's masks, in the order of its units' numbers.
MASKS = ("kNone", "kCausal", "kCustom", "kMultiItemScoring")
NONE, CAUSAL = MASKS[:2]
NOTE = "masks.txt"
# CUTLASS's products of further widths, which attention does not use, are more than half of the text to compile.
UNUSED_SHAPES = "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"
_UNIT = re.compile(r"_mask_(\d)$")
_CHOICE = "DISPATCH_context("
_CASE = "case MaskMode::{0}: {{ constexpr MaskMode MASK_MODE = MaskMode::{0}; __VA_ARGS__ break; }}"
_RUN = """\
#include <flashinfer/utils.cuh>
#undef DISPATCH_MASK_MODE
#define DISPATCH_MASK_MODE(mask_mode, MASK_MODE, ...) switch (mask_mode) {{ \\
  {cases} \\
  default: FLASHINFER_ERROR("this module was compiled for {masks} alone"); }}
#include "{whole}"
"""


def cut(module: Any, masks: Collection[str]) -> Any:
    """Return a JitSpec with the kernels of `masks`; without masks, of a module that is one unit.

    Raises RuntimeError if the sources have an unknown form.
    """
    return dataclasses.replace(
        module,
        sources=_cut_sources(module.sources, in_order(masks)) if masks else module.sources,
        extra_cuda_cflags=[flag for flag in module.extra_cuda_cflags if flag != UNUSED_SHAPES],
    )


def in_order(masks: Collection[str]) -> list[str]:
    """Return the masks in the order of flashinfer's."""
    return [mask for mask in MASKS if mask in masks]


def compiled_masks(module: Any) -> set[str]:
    """Return the masks that a compiled module has kernels for."""
    note = module.build_dir / NOTE
    if module.is_aot or not note.exists():
        return set(MASKS)
    return set(note.read_text().split())


def _cut_sources(sources: Sequence[Path], masks: Sequence[str]) -> list[Path]:
    numbers = {source: found[1] for source in sources if (found := _UNIT.search(source.stem))}
    choices = [it for it in sources if it not in numbers and _CHOICE in it.read_text()]
    if len(choices) != 1 or {*numbers.values()} != {str(number) for number in range(len(MASKS))}:
        raise RuntimeError("this version of flashinfer generates other units")
    [whole] = choices
    run = whole.with_name(f"{'_'.join(masks)}_{whole.name}")
    cases = " \\\n  ".join(map(_CASE.format, masks))
    text = _RUN.format(cases=cases, masks=", ".join(masks), whole=whole.name)
    if not run.exists() or run.read_text() != text:  # ninja compiles a newer source again
        run.write_text(text)
    kept = [it for it, number in numbers.items() if MASKS[int(number)] in masks]
    return [*kept, run, *(it for it in sources if it not in numbers and it != whole)]
