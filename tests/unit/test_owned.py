"""Owned tasks and threads: an unexpected end reaches the owner once, the owner's own end does not."""

import ast
import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kernels.host.owned import EndedError, OwnedTask, start_thread
from tests.unit.test_layout import ROOT, SOURCES, parsed

STARTS = {("asyncio", "create_task"), ("asyncio", "ensure_future"), ("threading", "Thread")}
OWNERS = (
    "kernels/host/owned.py",
    "cluster/supervisor/ray_calls.py",  # a future of a Ray call, which its caller reads
)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


async def waits() -> None:
    await asyncio.Event().wait()


async def returns() -> None:
    pass


async def raises() -> None:
    raise KeyError(7)


async def ended(work: Coroutine[Any, Any, None], **options: Any) -> list[BaseException]:
    """Return what the owner of ended work gets."""
    found: list[BaseException] = []
    task = OwnedTask(work, found.append, "the work", **options)
    while not task.done:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return found


def test_an_error_reaches_the_owner() -> None:
    (error,) = asyncio.run(ended(raises()))
    assert isinstance(error, KeyError)


def test_a_return_is_unexpected_unless_it_is_allowed() -> None:
    (error,) = asyncio.run(ended(returns()))
    assert isinstance(error, EndedError) and str(error) == "the work has returned"
    assert asyncio.run(ended(returns(), may_end=True)) == []


async def stubborn(outcome: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        await waits()
    except asyncio.CancelledError:
        await outcome()


@pytest.mark.parametrize(
    "work", [waits, lambda: stubborn(returns), lambda: stubborn(raises)], ids=range(3)
)
def test_closing_is_no_failure(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def scenario() -> list[BaseException]:
        found: list[BaseException] = []
        task = OwnedTask(work(), found.append, "the work")
        await asyncio.sleep(0)
        await task.close()
        assert task.done
        await asyncio.sleep(0)
        return found

    assert asyncio.run(scenario()) == []


def test_the_end_of_the_loop_is_no_failure() -> None:
    found: list[BaseException] = []

    async def scenario() -> None:
        OwnedTask(waits(), found.append, "the work")

    asyncio.run(scenario())
    assert found == []


def test_the_error_of_a_thread_reaches_its_owner() -> None:
    found: list[BaseException] = []

    def fails() -> None:
        raise SystemExit(3)

    start_thread(fails, found.append, "the work").join()
    start_thread(lambda: None, found.append, "the work").join()
    assert [type(error) for error in found] == [SystemExit]


def is_start(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    module = node.func.value
    return isinstance(module, ast.Name) and (module.id, node.func.attr) in STARTS


def names_in(node: ast.AST) -> set[str]:
    """Names and attributes, the part after the last dot."""
    nodes = list(ast.walk(node))
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return names | {each.attr for each in nodes if isinstance(each, ast.Attribute)}


def targets_of(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def unowned(tree: ast.AST) -> Iterator[int]:
    """Lines that start a task or thread which the function that starts it does not await itself."""
    for function in ast.walk(tree):
        if not isinstance(function, FUNCTIONS) or not any(map(is_start, ast.walk(function))):
            continue
        waits = [node for node in ast.walk(function) if isinstance(node, ast.Await)]
        awaited = set().union(*map(names_in, waits)) - {"self", "asyncio"}
        at_once = {id(node) for wait in waits for node in ast.walk(wait)}
        kept = {
            id(node)
            for statement in ast.walk(function)
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            and statement.value is not None
            and any(names_in(target) & awaited for target in targets_of(statement))
            for node in ast.walk(statement.value)
        }
        for node in ast.walk(function):
            if is_start(node) and id(node) not in at_once | kept:
                yield node.lineno


def test_each_task_and_thread_has_an_owner() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if str(path.relative_to(ROOT)) not in OWNERS
        and any(name in path.read_text() for _module, name in STARTS)  # parsing takes long
        for line in unowned(parsed(path))
    ]
    assert not found, f"use OwnedTask or start_thread of kernels.host.owned: {found}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("self._task = asyncio.create_task(work())", [2]),
        ("asyncio.ensure_future(work())", [2]),
        ("threading.Thread(target=work).start()", [2]),
        ("task = asyncio.create_task(work())\n    await other()", [2]),
        ("task = asyncio.create_task(work())\n    await asyncio.wait([task])", []),
        ("await asyncio.wait([asyncio.ensure_future(work())])", []),
        ("tasks = [asyncio.create_task(w) for w in works]\n    await asyncio.gather(*tasks)", []),
        ("self._task = asyncio.create_task(work())\n    await asyncio.shield(self._task)", []),
    ],
)
def test_a_task_without_an_owner_is_found(source: str, lines: list[int]) -> None:
    tree = ast.parse(f"async def start(self):\n    {source}\n")
    assert list(unowned(tree)) == lines
