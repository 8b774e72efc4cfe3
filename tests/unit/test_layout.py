"""The rules of the house that a reader of imports and line counts can check."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
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
    "deep_ep": ("kernels/all2all/deepep_package.py",),
    "deep_gemm": ("kernels/grouped_gemm/deepgemm_package.py",),
    "flashinfer": (
        "kernels/attention/flashinfer.py",
        "kernels/attention/flashinfer_fp8.py",
        "kernels/attention/flashinfer_mla.py",
        "kernels/attention/flashinfer_modules.py",
        "kernels/linear_attention/flashinfer_delta.py",
    ),
    "triton": ("kernels/triton",),
    "nixl_cu12": ("workers/kv_transfer/nixl_memory.py",),
}
# The folders and files from the lowest level up, one level a folder, so that a circle between folders fails. A unit
# imports from lower levels and from its own. The longest prefix of a path decides its unit.
ORDER = {
    "kernels": (
        ("activation.py", "pending.py", "block_fp8.py", "mxfp4.py", "four_bit_format.py"),
        ("gated_activation.py", "four_bit.py", "slot_table.py"),
        ("triton",),
        ("host",),
        ("native", "fused.py", "lora"),
        ("routing",),
        # What every backend class is declared by, and what the configuration reads without torch.
        ("interface",),
        ("attention",),
        ("linear_attention",),
        ("all2all",),
        ("grouped_gemm",),
        ("dense_fp8.py", "dense_four_bit.py"),
        ("backends",),
    ),
    "workers": (
        ("hub.py", "parallel.py", "log.py", "section.py"),
        ("lora_config.py", "speculation_config.py"),
        ("config.py",),
        ("wire",),
        # Plain data: of models, and of steps.
        ("specs",),
        ("step",),
        # Computes on a thread of its own what sequences wait for.
        ("images",),
        ("weights",),
        # Contents of the caches that move, then who owns the caches.
        ("kv_transfer",),
        ("kv_cache",),
        ("sampling",),
        ("speculation",),
        ("scheduler",),
        ("stats",),
        ("layers",),
        ("models",),
        ("adapters",),
        ("pooling",),
        # The runner runs a model whole or in ubatches; the rules of when to cut are measured with the runner.
        ("ubatch",),
        ("runner",),
        ("overlap",),
        ("engine",),
        ("rank",),
    ),
    "cluster": (
        ("errors.py",),
        ("config",),
        ("metrics",),
        # What lives with the ranks, then what an ingress holds of them.
        ("supervisor",),
        ("client",),
        # The text of an answer knows nothing of the request, and the formats of calls nothing of either.
        # Images are read without a request.
        ("api/images", "api/videos"),
        ("api/tools", "api/settings.py", "api/backend.py"),
        ("api/answer",),
        ("api/template_fit.py",),
        ("api/tokenizer.py",),
        ("api/work",),
        ("api/request",),
        ("api",),
        ("ingress", "bench"),
        # Offline requests start the ranks as `serve` does, and the command `batch` runs them.
        ("app.py", "commands", "offline"),
        ("experiments",),
        ("cli.py",),
    ),
}
# Imported when the backend is built, never when its module is.
LATE = ("deep_ep", "deep_gemm", "flashinfer", "nixl_cu12")

SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Several tests read all sources."""
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def forbidden(path: str, tree: ast.Module) -> list[str]:
    """Imports that this file may not have, as `path:line imports package`."""
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


def test_imports_go_one_way():
    found = [line for p in SOURCES for line in forbidden(str(p.relative_to(ROOT)), parsed(p))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/backends/select.py", "import workers.config"),
        ("kernels/all2all/base.py", "from workers import config"),
        ("workers/engine/engine.py", "from cluster.config.phalanx_config import load"),
        ("workers/engine/engine.py", "def f():\n    import ray"),
        ("workers/engine/engine.py", "from fastapi import FastAPI"),
        ("kernels/backends/select.py", "def f():\n    import deep_ep"),
        ("kernels/all2all/deepep_package.py", "import deep_ep"),
    ],
)
def test_the_rule_catches(path: str, source: str):
    assert len(forbidden(path, ast.parse(source))) == 1


def test_no_wait_can_lose_a_cancellation() -> None:
    """In Python 3.11, asyncio.wait_for drops a cancellation that comes as its future ends; asyncio.timeout does not."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "wait_for"
        and isinstance(node.value, ast.Name)
        and node.value.id == "asyncio"
    ]
    assert not found, f"use asyncio.timeout: {found}"


def imported_modules(path: Path) -> Iterator[str]:
    """What the import of this file imports, packages of this repository with their __init__.py."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def all_imported_modules(module: str) -> dict[str, str]:
    """Each module that the import of `module` imports through files of this repository: by which of them."""
    found, todo = {module: ""}, [module]
    while todo:
        name = todo.pop()
        path = ROOT / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.exists():  # of a library, or a name in a module
            continue
        parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        new = dict.fromkeys((*parents, *imported_modules(file)), name).items() - found.items()
        todo += [imported for imported, _ in new if imported not in found]
        found = dict(new) | found
    return found


@pytest.mark.parametrize(
    "module",
    [
        *("cluster.cli", "cluster.commands.serve", "cluster.app", "cluster.supervisor.actor"),
        *("cluster.ingress.ingress", "cluster.api.tokenizer", "workers.rank.actor"),
    ],
)
def test_processes_without_a_model_import_no_torch(module: str) -> None:
    """torch takes seconds and 200 MB of each process. A rank imports it while the next one starts."""
    found = all_imported_modules(module)
    assert len(found) > 10
    heavy = {name for name in found if name.split(".")[0] in ("torch", "transformers")}
    assert not heavy, {name: found[name] for name in heavy}


def test_a_module_that_imports_torch_later_is_found() -> None:
    assert all_imported_modules("workers.rank.process")["torch"].startswith("workers.")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "workers/rank/actor.py",
            "import ray\nfrom kernels.interface.config import KernelsConfig",
        ),
        ("kernels/all2all/deepep_package.py", "def f():\n    import deep_ep"),
    ],
)
def test_the_rule_allows(path: str, source: str):
    assert forbidden(path, ast.parse(source)) == []


def level(path: str) -> int:
    """The position of a source file in ORDER, all levels of `kernels` below those of `workers`, then `cluster`."""
    units = {
        f"{layer}/{unit}": (tuple(reversed(LAYERS)).index(layer), number)
        for layer, levels in ORDER.items()
        for number, units in enumerate(levels)
        for unit in units
    }
    layer, number = units[max((u for u in units if f"{path}/".startswith(f"{u}/")), key=len)]
    return 100 * layer + number


def modules() -> dict[str, str]:
    """Dotted name of each module with source, to its path relative to the root."""
    paths = (path.relative_to(ROOT) for path in SOURCES)
    return {".".join(path.with_suffix("").parts): str(path) for path in paths}


def imported(tree: ast.AST, known: Iterable[str], *, late: bool = True) -> set[str]:
    """The modules of `known` that a source imports; without `late`, those that importing it needs, for types too."""
    found = set()
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if late or not isinstance(node, functions):
            nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(known)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one node (Kosaraju)."""
    finished: dict[str, None] = {}
    backwards: dict[str, set[str]] = {node: set() for node in graph}

    def visit(node: str, edges: Mapping[str, set[str]], seen: dict[str, None]) -> None:
        if node in seen:
            return
        open_nodes = [(node, iter(sorted(edges[node])))]
        entered = {node}
        while open_nodes:
            current, following = open_nodes[-1]
            step = next((n for n in following if n not in seen and n not in entered), None)
            if step is None:
                seen[current] = None
                open_nodes.pop()
            else:
                entered.add(step)
                open_nodes.append((step, iter(sorted(edges[step]))))

    for node in graph:
        visit(node, graph, finished)
        for target in graph[node]:
            backwards[target].add(node)
    found: list[list[str]] = []
    reached: dict[str, None] = {}
    for node in reversed(list(finished)):
        before = len(reached)
        visit(node, backwards, reached)
        component = list(reached)[before:]
        if len(component) > 1:
            found.append(sorted(component))
    return found


def test_folders_import_from_lower_ones():
    known = modules()
    upwards = [
        f"{path} imports {target}"
        for path in known.values()
        for target in imported(parsed(ROOT / path), known)
        if level(known[target]) > level(path)
    ]
    assert upwards == []


def test_modules_have_no_circles():
    known = modules()
    graph = {
        name: imported(parsed(ROOT / path), known, late=False) - {name}
        for name, path in known.items()
    }
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == []


def test_every_file_has_a_level_and_every_unit_a_file():
    paths = [str(path.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py"]
    assert all(level(path) >= 0 for path in paths)
    for layer, levels in ORDER.items():
        for unit in (unit for units in levels for unit in units):
            assert any(f"{path}/".startswith(f"{layer}/{unit}/") for path in paths), unit


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["d", "e"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    source = "if TYPE_CHECKING:\n    from a.b import C\n\ndef f():\n    import a.c\n"
    known = ("a.b", "a.c", "a.d")
    assert imported(ast.parse(source), known, late=False) == {"a.b"}
    assert imported(ast.parse(source), known) == {"a.b", "a.c"}


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
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert set(too_long) <= EXCEPTIONS, too_long


def test_modules_say_what_they_are():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    assert [path for path, source in sources.items() if not source.isascii()] == []
    without = [str(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert [path for path in without if Path(path).read_text()] == [], "a docstring is missing"


def test_architecture_lists_every_module():
    text, folder, listed = (ROOT / "ARCHITECTURE.md").read_text(), "", set()
    for line in text.splitlines():
        if line.startswith("### `"):
            folder = line.split("`")[1].rstrip("/")
        elif folder and line.startswith("| `"):
            listed.add(f"{folder}/{line.split('`')[1].rstrip('/')}")
    modules = {str(p.relative_to(ROOT).with_suffix("")) for p in SOURCES if p.stem != "__init__"}
    families = {str(Path(path).parent) for path in modules if path.count("/") == 3}
    families = {path for path in families if path.startswith("workers/models/")}
    expected = {path for path in modules if str(Path(path).parent) not in families} | families
    assert listed == expected, listed ^ expected
