"""The official Node client, from npm: `node/openai.test.mjs` against the same server.

What npm installs stays in the user's cache folder, outside the source tree, and is used again.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "node"
MIN_NODE = 20


@pytest.fixture(scope="module")
def modules() -> Path:
    """The node_modules folder of package-lock.json."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    if int(version.strip().removeprefix("v").split(".")[0]) < MIN_NODE:
        pytest.skip(f"node is {version.strip()}, the client needs {MIN_NODE} or newer")
    lock = (FILES / "package-lock.json").read_bytes()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx-tests"
    folder = caches / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not folder.exists():
        caches.mkdir(parents=True, exist_ok=True)
        _install(npm, folder)
    return folder / "node_modules"


def _install(npm: str, folder: Path) -> None:
    """Install beside `folder` and rename: no other process sees half of it."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(FILES / name, fresh)
        command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        try:
            done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip("npm could not install the client within 120 s")
        if done.returncode:
            pytest.skip(f"npm could not install the client: {done.stderr.strip()[-300:]}")
        try:
            Path(fresh).rename(folder)
        except OSError:  # another process was faster
            assert folder.exists()
        else:
            Path(fresh).mkdir()  # for the end of the with block


def test_the_official_node_client(modules, server, tmp_path):
    shutil.copy(FILES / "openai.test.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    done = subprocess.run(
        ["node", "--test", "--test-reporter=tap", "openai.test.mjs"],
        cwd=tmp_path,
        env={**os.environ, "PHALANX_URL": server.url},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.M)
    assert passed and int(passed[1]) >= 25, done.stdout
    server.wait_free()
