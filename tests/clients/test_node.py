"""The official Node clients, from npm: the files `node/*.test.mjs` against the same server."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.installed import node_modules

FILES = Path(__file__).parent / "node"
pytestmark = pytest.mark.exhaustive  # npm installs them


@pytest.fixture(scope="module")
def modules() -> Path:
    return node_modules(FILES)


@pytest.mark.parametrize(("name", "number"), [("openai", 25), ("responses", 10), ("anthropic", 10)])
def test_an_official_node_client(modules, server, tmp_path, name, number):
    """The file's tests, of which there are at least so many."""
    shutil.copy(FILES / f"{name}.test.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    done = subprocess.run(
        ["node", "--test", "--test-reporter=tap", f"{name}.test.mjs"],
        cwd=tmp_path,
        env={**os.environ, "PHALANX_URL": server.url},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.M)
    assert passed and int(passed[1]) >= number, done.stdout
    server.wait_free()
