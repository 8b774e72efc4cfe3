"""The dependencies that pyproject.toml declares are those that production code imports."""

import ast
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
OPTIONAL = {
    *("deep_ep", "deep_gemm", "flashinfer", "matplotlib", "opentelemetry", "triton", "uvloop"),
    "filelock",  # flashinfer brings it, and locks its modules with it
}
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
