"""Runs the work of a rank's call in a thread, and raises its errors so that a supervisor can read them without torch.

To read an error, Ray imports the module of its class: torch would take 190 MB in the supervisor, and stop its loop for
seconds in the middle of a rebuild.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Return the result of `work`. An error of a class of torch becomes a RuntimeError with its name and text."""
    try:
        return await asyncio.to_thread(work, *args)
    except Exception as error:
        kind = type(error)
        if kind.__module__.partition(".")[0] != "torch":
            raise
        raise RuntimeError(f"{kind.__name__}: {error}") from error
