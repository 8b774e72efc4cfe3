"""`Pending`: the only way to the result of an all-to-all, the same for every backend."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _OfThread(threading.local):
    """The functions that the ubatches of a step have set for their thread."""

    yield_ubatch: Callable[[], None] | None = None
    wait_previous_ubatch: Callable[[], None] | None = None


_of_thread = _OfThread()


def set_yield_ubatch(
    yield_ubatch: Callable[[], None] | None, wait_previous_ubatch: Callable[[], None] | None = None
) -> None:
    """Set what this thread does while the ubatches of a step take turns on it; None ends that.

    yield_ubatch           runs the next ubatches and returns when it is the caller's turn again; `Pending.wait` calls
                           it before it blocks
    wait_previous_ubatch   makes the current stream wait for the turn before; see the function of that name
    """
    _of_thread.yield_ubatch, _of_thread.wait_previous_ubatch = yield_ubatch, wait_previous_ubatch


def can_yield_ubatch() -> bool:
    """Return whether `Pending.wait` on this thread lets other ubatches run first."""
    return _of_thread.yield_ubatch is not None


def wait_previous_ubatch() -> None:
    """Make the current stream wait for all work that the previous turn put on its stream; without ubatches do nothing.

    Attention calls it between writing and reading its cache, the middle of a turn, because in a CUDA graph each ubatch
    has a stream of its own. Then attention reads what earlier ubatches have written. And no long kernel takes the SMs
    from the short kernels before another ubatch's all-to-all, for which all ranks would have to wait.
    """
    if _of_thread.wait_previous_ubatch is not None:
        _of_thread.wait_previous_ubatch()


class Pending(Generic[T]):
    """A result in flight. `wait` blocks until it has arrived; later calls return the same result."""

    def __init__(self, finish: Callable[[], T]):
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._error: BaseException | None = None

    @classmethod
    def ready(cls, result: T) -> "Pending[T]":
        """Return a result that needs no waiting."""
        pending = cls.__new__(cls)
        pending._finish, pending._result, pending._error = None, result, None
        return pending

    def wait(self) -> T:
        """Return the result or raise the all-to-all's error. Where ubatches take turns, the next ubatches run first."""
        if self._finish is not None:
            yield_ubatch = _of_thread.yield_ubatch
            if yield_ubatch is not None:
                yield_ubatch()
        return self.result()

    def result(self) -> T:
        """Do as `wait` but yield to no ubatch; for an all-to-all that must first finish its own earlier one."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
