"""The rules of the house that a reader of imports and line counts can check."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("cluster", "workers", "kernels")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
EXCEPTIONS: frozenset[str] = (
    frozenset()
)  # files and functions that may be longer, each with a reason

# Who may import what: the folders or files, relative to the root.
ALLOWED = {
    "cluster": ("cluster",),
    "workers": ("cluster", "workers"),
    "ray": ("cluster", "workers/rank/actor.py"),
    "fastapi": ("cluster",),
    "starlette": ("cluster",),
    "uvicorn": ("cluster",),
    "deep_ep": ("kernels/all2all/deepep.py",),
    "deep_gemm": ("kernels/grouped_gemm/deepgemm.py",),
    "flashinfer": (
        "kernels/attention/flashinfer.py",
        "kernels/attention/flashinfer_modules.py",
    ),
    "triton": ("kernels/triton",),
}
# Imported when the backend is built, never when its module is.
LATE = ("deep_ep", "deep_gemm", "flashinfer")

SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def forbidden(path: str, source: str) -> list[str]:
    """Imports that this file may not have, as `path:line imports package`."""
    tree = ast.parse(source)
    found = []
    for line, package in imports(tree):
        places = ALLOWED.get(package)
        if places and not any(path == place or path.startswith(f"{place}/") for place in places):
            found.append(f"{path}:{line} imports {package}")
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for statement in top_level:
        for line, package in imports(ast.Module([statement], [])):
            if package in LATE:
                found.append(f"{path}:{line} imports {package} before its backend is built")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path):
    assert forbidden(str(path.relative_to(ROOT)), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/backends/select.py", "import workers.config"),
        ("kernels/all2all/base.py", "from workers import config"),
        ("workers/engine/engine.py", "from cluster.config.phalanx_config import load"),
        ("workers/engine/engine.py", "def f():\n    import ray"),
        ("workers/engine/engine.py", "from fastapi import FastAPI"),
        ("kernels/backends/select.py", "def f():\n    import deep_ep"),
        ("kernels/all2all/deepep.py", "import deep_ep"),
    ],
)
def test_the_rule_catches(path: str, source: str):
    assert len(forbidden(path, source)) == 1


def test_the_rule_allows():
    assert (
        forbidden(
            "workers/rank/actor.py", "import ray\nfrom kernels.backends.config import KernelsConfig"
        )
        == []
    )
    assert forbidden("kernels/all2all/deepep.py", "def f():\n    import deep_ep") == []


def test_there_are_sources():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(LAYERS)


def test_kernels_package_is_empty():
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_files_are_short():
    everything = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in everything}
    too_long = {path: length for path, length in lengths.items() if length > MAX_FILE_LINES}
    assert set(too_long) <= EXCEPTIONS, too_long


def test_functions_are_short():
    too_long = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert set(too_long) <= EXCEPTIONS, too_long


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_say_what_they_are(path: Path):
    source = path.read_text()
    assert source == "" or ast.get_docstring(ast.parse(source)), "a module docstring is missing"
    assert source.isascii()
