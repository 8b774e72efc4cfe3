"""The wheel: what it holds, and that it works where the checkout is not."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
BUILD = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"
DATA = (
    *(
        "cluster/share/local.yaml",
        "cluster/share/schema.json",
        "cluster/share/grafana/phalanx.json",
    ),
    *("cluster/share/models/demo/model.safetensors", "cluster/share/models/demo/tokenizer.json"),
    *("cluster/web/index.html", "kernels/native/cpu.c"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked wheel."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in (*LAYERS, "configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=unwanted)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 40e6
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder / "installed")
    return folder / "installed"


def phalanx(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the wheel in a folder where the checkout cannot be imported."""
    program = (
        "import sys; wheel, checkout = sys.argv[1:3]; del sys.argv[1:3]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__ + str(f)]\n"
        "sys.path[:] = [wheel, *(path for path in sys.path if path not in ('', checkout))]\n"
        "import cluster, workers, kernels\n"
        "assert all(layer.__file__.startswith(wheel) for layer in (cluster, workers, kernels))\n"
        "from cluster.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(installed), str(REPOSITORY), *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_wheel_has_every_module_and_the_data(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    modules = {
        str(path.relative_to(REPOSITORY))
        for layer in LAYERS
        for path in (REPOSITORY / layer).rglob("*.py")
    }
    pages = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "cluster/web").iterdir()}
    assert modules | pages | set(DATA) <= files
    assert not [
        name for name in files if name.startswith(("tests/", "scripts/")) or "qwen3-30b" in name
    ]


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_help(installed: Path, tmp_path: Path, command: str) -> None:
    done = phalanx(installed, tmp_path, command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_demo_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    done = phalanx(installed, tmp_path, "check", "--set", "cluster.ranks=1", "--json")
    assert done.returncode == 0, done.stderr
    assert f'"path": "{installed}/cluster/share/models/demo"' in done.stdout


OPTIONAL = {"deep_ep", "deep_gemm", "flashinfer", "matplotlib", "opentelemetry", "triton", "uvloop"}
"""Imported where they are installed; the code around each import names what is missing."""
PARTS = {"starlette": "fastapi"}
"""Packages that another dependency exports as part of its own interface."""
DISTRIBUTIONS = {"yaml": "pyyaml", "zmq": "pyzmq", "huggingface_hub": "huggingface-hub"}


def imported_packages() -> dict[str, str]:
    """The packages that production code imports, with one file each."""
    found: dict[str, str] = {}
    for path in (file for layer in LAYERS for file in (REPOSITORY / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], str(path.relative_to(REPOSITORY)))
    return found


def test_an_installation_brings_all_that_is_imported() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=!~;]", line)[0] for line in project["dependencies"]}
    own = {*LAYERS, *sys.stdlib_module_names}
    for name, path in imported_packages().items():
        if name in own or name in OPTIONAL:
            continue
        name = PARTS.get(name, name)
        distribution = DISTRIBUTIONS.get(name, name.replace("_", "-"))
        assert distribution in declared, f"{path} imports {name}"
