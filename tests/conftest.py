"""One thread a test process: the suite runs several processes on few cores. Without a GPU, Triton interprets."""

import os
import signal

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in children

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # For tests/triton. Read when Triton is imported, and libraries of other tests do that.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts background jobs with SIGINT ignored, and the commands that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one process of `--dist loadgroup` run a file, or all files of a folder that share a server."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        shared = any(definitions[-1].scope == "package" for definitions in fixtures)
        item.add_marker(pytest.mark.xdist_group(str(item.path.parent if shared else item.path)))
