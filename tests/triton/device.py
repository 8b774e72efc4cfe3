"""Where the tests of Triton's kernels run."""

from typing import Any

import torch

COMPILED = torch.cuda.is_available()
DEVICE = "cuda" if COMPILED else "cpu"


def compiled_only(*cases: Any) -> list[Any]:
    """Cases for which the interpreter takes too long, or which it gets wrong."""
    return list(cases) if COMPILED else []
