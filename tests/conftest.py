"""One thread a test process: the suite runs several processes on few cores. Without a GPU, Triton interprets."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in children

import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.integrity import check_every_step

torch.set_num_threads(1)
check_every_step()
if not torch.cuda.is_available():
    # For tests/triton. Read when Triton is imported, and libraries of other tests do that.
    os.environ["TRITON_INTERPRET"] = "1"

# Time says nothing about a test where others share the cores. In CI hypothesis draws the same examples every time.
settings.register_profile(
    "suite", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# A disk to which other processes write takes 0.1 s for it, and no test reads files behind a crash of the machine.
os.fsync = lambda fd: None

# A shell starts background jobs with SIGINT ignored, and the commands that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


MOST_TRACKED = 50_000
"""Objects that garbage collections visit in 10 ms."""


def pytest_collection_finish() -> None:
    """Exclude what lives until the end from garbage collections: engines collect when they close, each in 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude what a file has left for good too, such as the modules of transformers."""
    yield
    another_file = nextitem is not None and nextitem.path != item.path
    if another_file and len(gc.get_objects()) > MOST_TRACKED:
        gc.collect()
        gc.freeze()


# Folders whose files share servers: one process runs all files of a folder.
SHARED_SERVERS = ("tests/clients/", "tests/serve/")


class ByServer(LoadScopeScheduling):
    """Gives a file to one process, and all files that share a server to one process, because each process starts it.

    The first process begins with the folders of SHARED_SERVERS: as the last ones they would keep one process waiting,
    and two servers at once would wait for each other's processor time, and later idle. The second process takes the
    files from the end, where the unit tests are, and a third one from the beginning, where the ranks without servers
    are: they compute while servers of the first process start, wait and stop.
    xdist's own `loadgroup` has no effect with pytest 9.2: it writes an attribute that a node no longer has.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        number = int(node.gateway.id.removeprefix("gw"))
        servers = [scope for scope in self.workqueue if scope in SHARED_SERVERS]
        files = [scope for scope in self.workqueue if scope not in SHARED_SERVERS]
        if number % 3 == 1:
            files.reverse()
        first, *_ = files + servers if number else servers + files
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        folders = (folder for folder in SHARED_SERVERS if nodeid.startswith(folder))
        return next(folders, nodeid.split("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServer | None:
    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None
