"""Runs work on many items with a bounded number at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def run_pool(items: Iterable[T], work: Callable[[T], Awaitable[None]], size: int) -> None:
    """Call `work` for each item, in order, at most `size` at once. The first error ends all work and is raised.

    An item is read when a place is free, so `items` may be longer than memory.
    """
    remaining = iter(items)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                group.create_task(_worker(remaining, work))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _worker(remaining: Iterator[T], work: Callable[[T], Awaitable[None]]) -> None:
    for item in remaining:
        await work(item)
        await asyncio.sleep(0)  # work without a wait, such as a refusal, lets other tasks run
