"""`Pending`: the only way to the result of an exchange, the same for every backend."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _OfThread(threading.local):
    """What a thread does before it waits, and in the middle of a slice's turn."""

    yield_ubatch: Callable[[], None] | None = None
    wait_previous_ubatch: Callable[[], None] | None = None


_of_thread = _OfThread()


def set_yield_ubatch(
    yield_ubatch: Callable[[], None] | None, wait_previous_ubatch: Callable[[], None] | None = None
) -> None:
    """From now on `wait` on this thread calls `yield_ubatch` first, where other work can go on; None: it just waits.

    wait_previous_ubatch    what `wait_previous_ubatch` does from now on; None: nothing
    """
    _of_thread.yield_ubatch, _of_thread.wait_previous_ubatch = yield_ubatch, wait_previous_ubatch


def can_yield_ubatch() -> bool:
    """Whether `wait` on this thread lets other work go on first."""
    return _of_thread.yield_ubatch is not None


def wait_previous_ubatch() -> None:
    """What this thread gives its stream next begins after all that other slices gave theirs before they handed over.

    Called in the middle of what a slice computes between two exchanges, where slices have streams of their own.
    Attention then finds what earlier slices have written to its cache. And no long kernel keeps from the SMs
    the short ones that come before another slice's exchange: ranks would wait for it, with nothing left to compute.
    """
    if _of_thread.wait_previous_ubatch is not None:
        _of_thread.wait_previous_ubatch()


class Pending(Generic[T]):
    """A result under way. `wait()` blocks until it is there; asked again, it answers the same."""

    def __init__(self, finish: Callable[[], T]):
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._error: BaseException | None = None

    @classmethod
    def ready(cls, result: T) -> "Pending[T]":
        """A result that needs no waiting."""
        pending = cls.__new__(cls)
        pending._finish, pending._result, pending._error = None, result, None
        return pending

    def wait(self) -> T:
        """The result; raises what the exchange raised. Where slices of a step alternate, the others run first."""
        if self._finish is not None:
            yield_ubatch = _of_thread.yield_ubatch
            if yield_ubatch is not None:
                yield_ubatch()
        return self.result()

    def result(self) -> T:
        """`wait` without letting others run: for exchanges that must finish an earlier one of their own."""
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
