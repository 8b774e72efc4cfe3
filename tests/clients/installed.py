"""Packages that only these tests use: installed once into the user's cache folder, from files with pinned versions.

Where they cannot be installed, for example without a network, a test skips with the reason. It fails with the reason
where the environment variable CI is set: there a skip would hide that no client was tried.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

MIN_NODE = 20
TIMEOUT_S = 200


def node_modules(files: Path) -> Path:
    """The node_modules folder of the package-lock.json in `files`."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        _give_up("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    if int(version.strip().removeprefix("v").split(".")[0]) < MIN_NODE:
        _give_up(f"node is {version.strip()}, the clients need {MIN_NODE} or newer")
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    names = ("package.json", "package-lock.json")
    return _installed(command, [files / name for name in names], "node") / "node_modules"


def python_packages(requirements: Path) -> Path:
    """A folder for PYTHONPATH with every package of `requirements`, and none of this environment."""
    options = ["--no-deps", "--no-compile", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options]
    command += ["--target=packages", "-r", requirements.name]
    tag = f"python-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    return _installed(command, [requirements], tag) / "packages"


def _give_up(reason: str) -> NoReturn:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def _installed(command: list[str], files: list[Path], kind: str) -> Path:
    """The cached folder in which `command` ran beside copies of `files`, the last of which names it."""
    digest = hashlib.sha256(files[-1].read_bytes()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx-tests"
    folder = caches / f"{kind}-{digest}"
    if not folder.exists():
        caches.mkdir(parents=True, exist_ok=True)
        _install(command, files, folder)
    return folder


def _install(command: list[str], files: list[Path], folder: Path) -> None:
    """Install beside `folder` and rename: no other process sees half of it."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        for file in files:
            shutil.copy(file, fresh)
        try:
            done = subprocess.run(
                command, cwd=fresh, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            _give_up(f"{command[0]} could not install the clients within {TIMEOUT_S} s")
        if done.returncode:
            _give_up(f"the clients could not be installed: {done.stderr.strip()[-1000:]}")
        try:
            Path(fresh).rename(folder)
        except OSError:  # another process was faster
            assert folder.exists()
        else:
            Path(fresh).mkdir()  # for the end of the with block
