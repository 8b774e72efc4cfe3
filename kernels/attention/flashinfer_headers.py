"""Headers in place of CUTLASS's that flashinfer includes and its attention does not use.

Every unit of FlashAttention 3 includes all of CUTLASS's GEMM builders, epilogues and test helpers, which take most of
the time to compile it. These files come before them in the order of search. They add no code: a unit that needs more
does not compile, and then `compile_missing` compiles it with CUTLASS's own.
"""

import os
from pathlib import Path

_UNUSED = (
    *("epilogue/collective/collective_builder.hpp", "epilogue/collective/default_epilogue.hpp"),
    *("epilogue/thread/linear_combination.h", "gemm/device/gemm_grouped.h"),
    *("gemm/device/gemm_universal_adapter.h", "gemm/kernel/default_gemm_grouped.h"),
    *("gemm/kernel/gemm_universal.hpp", "util/command_line.h", "util/distribution.h"),
    *("util/host_tensor.h", "util/packed_stride.hpp", "util/reference/device/gemm.h"),
    *("util/reference/device/tensor_compare.h", "util/reference/device/tensor_fill.h"),
    "util/tensor_view_io.h",
)
_BUILDER = "gemm/collective/collective_builder.hpp"
_ITS_PARTS = (
    *("arch/memory.h", "arch/memory_sm80.h", "gemm/collective/collective_builder_decl.hpp"),
    "gemm/collective/builders/sm90_common.inl",
)


def write_headers(folder: Path) -> None:
    """Write the headers below `folder`, unless they are there."""
    parts = "".join(f'#include "cutlass/{name}"\n' for name in _ITS_PARTS)
    for name, text in {**dict.fromkeys(_UNUSED, ""), _BUILDER: parts}.items():
        path, text = folder / "cutlass" / name, f"#pragma once\n{text}"
        if not path.is_file() or path.read_text() != text:  # a new time would compile units again
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(text)
            draft.replace(path)  # another process may compile with it
