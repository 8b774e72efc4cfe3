"""The wheel, installed into an environment of its own: its files, and its commands where the checkout is not."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.serve.server import START_TIMEOUT_S, free_port, left_running

REPOSITORY = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
BUILD = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"
CHECKS = """
import sys
from pathlib import Path
from typer.testing import CliRunner
from cluster import cli
from cluster.config.examples import CONFIGS, EXPERIMENTS, names
for command, folder, options in (("check", CONFIGS, []), ("experiment", EXPERIMENTS, ["--dry-run"])):
    for name in names(folder):
        result = CliRunner().invoke(cli.app, [command, name, *options])
        print(command, name, result.exit_code)
        if result.exit_code:
            sys.exit(result.output)
print(CliRunner().invoke(cli.app, ["check", "--set", "cluster.ranks=1", "--json"]).output)
"""
"""Checks every example by its name, then the demo, in one process because imports take most of the time."""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel alone; its dependencies come from the environment of the tests."""

    environment: Path

    @property
    def packages(self) -> Path:
        """The folder that pip installed into."""
        return next(self.environment.glob("lib/python*/site-packages"))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its commands. A .pth file, such as that of the checkout, has no effect there."""
        borrowed = [path for path in sys.path if path.endswith("site-packages")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(borrowed)}

    def command(self, *arguments: str) -> list[str]:
        """Arguments of a process of `phalanx`."""
        return [str(self.environment / "bin" / "phalanx"), *arguments]

    def phalanx(self, cwd: Path, *arguments: str) -> str:
        """Run a command to its end, and return what it printed."""
        return self.run(cwd, *self.command(*arguments))

    def python(self, cwd: Path, program: str) -> str:
        """Run a program in the environment's Python, and return what it printed."""
        return self.run(cwd, str(self.environment / "bin" / "python"), "-c", program)

    def run(self, cwd: Path, *command: str) -> str:
        """Run a command to its end, and return what it printed."""
        done = subprocess.run(
            command, cwd=cwd, env=self.variables, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this checkout, installed by pip into an empty environment."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in (*LAYERS, "configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=unwanted)
    run([sys.executable, "-c", BUILD, str(folder)], source)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 40e6
    environment = folder / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet"]
    run([*pip, "--no-index", "--no-deps", str(wheel)], folder)
    return Installed(environment)


def run(command: list[str], cwd: Path) -> None:
    """Run a command to its end."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_every_module_and_all_examples(installed: Installed) -> None:
    folder = installed.packages
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    modules = {
        str(path.relative_to(REPOSITORY))
        for layer in LAYERS
        for path in (REPOSITORY / layer).rglob("*")
        if path.suffix in (".py", ".c") or path.name == "py.typed"
    }
    pages = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "cluster/web").iterdir()}
    configs = REPOSITORY / "configs"
    examples = {
        f"cluster/share/{path.relative_to(configs)}"
        for path in configs.rglob("*")
        if path.is_file()
    }
    assert {f"{layer}/py.typed" for layer in LAYERS} < modules and len(examples) > 25
    assert not (modules | pages | examples) - files
    assert not [name for name in files if name.startswith(("tests/", "scripts/"))]


def test_its_version(installed: Installed, tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert installed.phalanx(tmp_path, "--version") == f"phalanx {project['version']}\n"


def test_every_example_passes_its_check(installed: Installed, tmp_path: Path) -> None:
    printed = installed.python(tmp_path, CHECKS)
    expected = [
        f"{command} {name} 0"
        for command, folder in (("check", "configs"), ("experiment", "configs/experiments"))
        for name in sorted(path.stem for path in (REPOSITORY / folder).glob("*.yaml"))
    ]
    assert printed.splitlines()[: len(expected)] == expected
    # the demo needs no checkout
    assert f'"path": "{installed.packages}/cluster/share/models/demo"' in printed


def test_an_experiment_runs_without_the_checkout(installed: Installed, tmp_path: Path) -> None:
    small = [
        *("sweep.grid={workload.input_len: [4, 8]}", "config={cluster: {ranks: 1, device: cpu}}"),
        *("workload={requests: 2, output_len: 2}", "repeats=1", "warmup=0", "report={}"),
    ]
    options = [part for text in small for part in ("--set", text)]
    printed = installed.phalanx(tmp_path, "experiment", "skew-cpu", *options)
    assert "wrote experiments/skew-cpu/summary.md" in printed
    folder = tmp_path / "experiments" / "skew-cpu"
    assert "2 of 2 runs" in (folder / "summary.md").read_text()
    head = json.loads((folder / "experiment.json").read_text())
    assert head["origin"]["commit"] is None, "the package is in no checkout"
    assert head["overrides"] == small


@pytest.mark.exhaustive
def test_a_server_and_a_load_run_without_the_checkout(installed: Installed, tmp_path: Path) -> None:
    """It also stops at SIGTERM with nothing to do, before a drain would end, without a process or a warning left."""
    port, log = free_port(), tmp_path / "log"
    settings = ["--set", f"serve.port={port}", "--set", "cluster.ranks=1"]
    with log.open("w") as output:
        server = subprocess.Popen(
            installed.command("serve", *settings, "--set", "cluster.device=cpu"),
            cwd=tmp_path,
            env=installed.variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not re.search(r"^ready in .*http", log.read_text(), re.M):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        family = psutil.Process(server.pid).children(recursive=True)
        load = ["--requests", "4", "--warmup", "0", "--input-len", "8", "--output-len", "4"]
        url = f"http://127.0.0.1:{port}"
        printed = installed.phalanx(tmp_path, "bench", "--url", url, *load)
        assert re.search(r"output tokens +16\b", printed), printed
        assert re.search(r"errors +0\b", printed), printed
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()
        assert time.monotonic() - started < 25 and not left_running(family, 30)
    finally:
        server.kill()
        server.wait()
    printed = log.read_text()
    assert "ERROR" not in printed and "WARNING" not in printed, printed
