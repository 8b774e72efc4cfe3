"""Libraries built on the official clients: the checks of `libraries/` against the same server.

Their pinned packages stay in the user's cache folder, because in this environment they would be many and would decide
the versions of others. A process for each library runs beside the others, because most of their time is the server's.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.installed import python_packages

FILES = Path(__file__).parent / "libraries"
MODULES = sorted(path.stem for path in FILES.glob("*_checks.py"))
# The first run installs, and compiles what it imports.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
Report = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module")
def report(server, tmp_path_factory) -> Report:
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
        command = [sys.executable, "-S", str(FILES / "run.py"), server.url, str(folder), name]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    found = {}
    with ExitStack() as stack:
        processes = {name: stack.enter_context(start(name)) for name in MODULES}
        for process in processes.values():
            stack.callback(process.kill)
        for name, process in processes.items():
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0, output
            found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_library(report, server, name):
    failed = [f"{check}:\n{error}" for check, error in report[name].items() if error]
    assert report[name] and not failed, "\n".join(failed)
    server.wait_free()
