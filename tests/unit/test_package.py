"""pyproject.toml, constraints.txt and the code agree: on dependencies, and on one version everywhere."""

import ast
import platform
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.unit.api_fakes import Api
from workers.stats.versions import phalanx_version

REPOSITORY = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    *("av", "deep_ep", "deep_gemm", "flashinfer", "matplotlib", "nixl_cu12", "opentelemetry"),
    *("triton", "uvloop"),
}
"""Imported where they are installed; the code around each import names what is missing."""
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq"}
"""Modules with another name than their distribution."""


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


def declared(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(line.name): line for line in map(Requirement, lines)}


def constraints() -> dict[str, Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return declared([line for line in lines if not line.startswith("#")])


def test_imports_are_declared_and_declarations_are_imported() -> None:
    own = {*LAYERS, *sys.stdlib_module_names, *OPTIONAL}
    imported = {
        canonicalize_name(DISTRIBUTIONS.get(name, name)): path
        for name, path in imported_packages().items()
        if name not in own
    }
    dependencies = declared(PROJECT["dependencies"])
    undeclared = {name: path for name, path in imported.items() if name not in dependencies}
    assert not undeclared, "imported by these files, but no dependency of pyproject.toml"
    assert not dependencies.keys() - imported.keys(), "dependencies that no module imports"


def test_the_constraints_fit_the_bounds_and_name_every_dependency() -> None:
    pinned = constraints()
    extras = [PROJECT["optional-dependencies"][name] for name in ("dev", "bench", "tracing")]
    for lines in (PROJECT["dependencies"], *extras):
        for name, wanted in declared(lines).items():
            (pin,) = pinned[name].specifier
            assert wanted.specifier.contains(pin.version), f"{wanted} excludes {pinned[name]}"
    loose = {name for name, pin in pinned.items() if "==" not in str(pin.specifier)}
    assert loose == {"torch", "triton"}
    (gpu_torch,) = [line for line in PROJECT["optional-dependencies"]["gpu"] if "torch" in line]
    assert Requirement(gpu_torch).specifier.contains("2.11.0")
    assert pinned["torch"].specifier.contains("2.11.0"), "the gpu extra needs an older torch"


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert phalanx_version() == version, "an older installation; scripts/check renews it"
    api = Api()
    assert api.get("/openapi.json").json()["info"]["version"] == version
    assert api.get("/version").json() == {"version": version}
    assert f'phalanx:build_info{{python="{platform.python_version()}",version="{version}"}} 1' in (
        api.get("/metrics").text
    )
    headings = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert next(heading for heading in headings if heading != "Unreleased") == version
    tags = {
        (str(path.relative_to(REPOSITORY)), tag)
        for folder in ("configs", "docs", "scripts")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".md", ".yaml", "") and path.is_file()
        for tag in re.findall(r"\bphalanx:(\d[\w.]*)", path.read_text())
    }
    assert tags and {tag for _, tag in tags} == {version}, tags


def test_no_module_has_a_version_of_its_own() -> None:
    pattern = re.compile(rf"""["']{re.escape(PROJECT["version"])}["']""")
    files = [path for layer in LAYERS for path in (REPOSITORY / layer).rglob("*.py")]
    assert not [path for path in files if pattern.search(path.read_text())]


def test_every_layer_is_typed_and_every_declared_python_has_a_classifier() -> None:
    assert all((REPOSITORY / layer / "py.typed").is_file() for layer in LAYERS)
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert [Version(name) for name in named] == [Version(f"3.{minor}") for minor in range(11, 15)]
    assert PROJECT["requires-python"] == f">={named[0]}"
