"""Owned tasks and threads: an unexpected end reaches the owner once, the owner's own end does not."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kernels.host.owned import EndedError, OwnedTask, start_thread


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
