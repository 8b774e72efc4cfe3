"""Settings that must be there before a GPU is touched, in this process and in the ranks it starts; early failures."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from kernels.host import cuda_environment
from tests.gpu.pools import Pools

# As served ranks do: what a start has compiled serves the tests.
cuda_environment.prepare(os.environ)

SHOWN = 3000  # characters of a failure, its last ones


class TellAtOnce:
    """Prints why a test failed when it has, and not only at the end, which a limit on time may cut off."""

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and report.nodeid.startswith("tests/gpu/"):
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext[-SHOWN:]}")


def pytest_configure(config: pytest.Config) -> None:
    """Also called when pytest finds this file late."""
    config.pluginmanager.register(TellAtOnce(config), "tell-at-once")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """The processes of one file's ranks."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True, scope="module")
def freed_memory() -> Iterator[None]:
    """Free what a file's tests leave on the GPU, because later files measure the memory of their process."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
