"""The Triton kernels against plain torch: compiled where there is a GPU, else in Triton's interpreter on the CPU.

So every machine can run these tests, and a GPU machine those of the same files that are too large for the interpreter.
What waits for other ranks in a kernel has inline assembly, which only a GPU runs: see tests/gpu/test_all2all_cuda.py.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.triton.device import COMPILED

# The development extra brings it to Linux; elsewhere there is none.
collect_ignore_glob = ["test_*.py"] if find_spec("triton") is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU these are tests of it."""
    for item in items:
        if COMPILED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
