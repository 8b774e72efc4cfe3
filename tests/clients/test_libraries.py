"""Libraries built on the official clients: the checks of `libraries/` against the same server.

Their pinned packages stay in the user's cache folder, because in this environment they would be many and would decide
the versions of others. A process for each library runs beside the others, because most of their time is the server's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.conftest import DEMO, MODEL
from tests.clients.installed import python_packages
from tests.serve.server import Server, running

FILES = Path(__file__).parent / "libraries"
CHECKS, VECTORS = (
    sorted(path.stem for path in FILES.glob(f"*_{kind}.py")) for kind in ("checks", "vectors")
)
# The first run installs, and compiles what it imports.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
Report = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module")
def embedder(server, tmp_path_factory) -> Iterator[Server]:
    """The demo model as one of embeddings, in the Ray of the other server."""
    with running(
        tmp_path_factory.mktemp("embedder"),
        DEMO,
        joins=server,
        model={"task": "embed", "pooling": {"dimensions": [16]}, "dtype": "float32"},
        serve={"model_name": MODEL},
    ) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def report(server, embedder, tmp_path_factory) -> Report:
    """{module: {check of an API: traceback, or None}}."""
    packages = python_packages(FILES / "requirements.txt")
    folder = tmp_path_factory.mktemp("libraries")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(packages),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }

    def start(name: str) -> subprocess.Popen[str]:
        # -S: none of this environment's packages.
        url = (embedder if name in VECTORS else server).url
        command = [sys.executable, "-S", str(FILES / "run.py"), url, str(folder), name]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    found = {}
    with ExitStack() as stack:
        processes = {name: stack.enter_context(start(name)) for name in CHECKS + VECTORS}
        for process in processes.values():
            stack.callback(process.kill)
        for name, process in processes.items():
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0, output
            found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", CHECKS + VECTORS)
def test_a_library(report, server, embedder, name):
    failed = [f"{check}:\n{error}" for check, error in report[name].items() if error]
    assert report[name] and not failed, "\n".join(failed)
    (embedder if name in VECTORS else server).wait_free()
