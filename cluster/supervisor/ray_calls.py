"""Results of Ray calls in asyncio: asyncio takes coroutines, Ray's references are only awaitable."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def result(ref: Awaitable[T]) -> T:
    """The result of a Ray call."""
    return await ref


async def gather(refs: Iterable[Awaitable[T]]) -> list[T]:
    """The results of Ray calls; the first error is raised at once."""
    return await asyncio.gather(*map(result, refs))


def result_future(ref: Awaitable[T]) -> "asyncio.Future[T]":
    """The result of a Ray call as a future; asyncio does not log its exception if nothing reads it."""
    future = asyncio.ensure_future(result(ref))
    future.add_done_callback(_read_exception)
    return future


def _read_exception(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
