"""Where the tests of Triton's kernels run."""

from typing import Any

import torch

from kernels.host.hopper import on_hopper

COMPILED = torch.cuda.is_available()
DEVICE = "cuda" if COMPILED else "cpu"
FOR_HOPPER = on_hopper() or not COMPILED  # kernels are compiled for it, on this GPU or without one


def compiled_only(*cases: Any) -> list[Any]:
    """Cases for which the interpreter takes too long, or which it gets wrong."""
    return list(cases) if COMPILED else []
