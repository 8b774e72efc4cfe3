"""The Triton kernels against plain torch: compiled where there is a GPU, else in Triton's interpreter on the CPU.

So every machine can run these tests, but for the cases that are too large for the interpreter. It knows no assembly, in
which ranks wait for each other, and no Gluon, which runs as Python instead; that all kernels compile is a test of its
own, in test_forms.py.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.triton.device import COMPILED

# The development extra brings it to Linux; elsewhere there is none.
if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not COMPILED:
    from tests.triton.interpreter import speed_up

    speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU these are tests of it."""
    for item in items:
        if COMPILED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
