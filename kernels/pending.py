"""`Pending`: the only way to the result of an exchange, the same for every backend."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
        """The result; raises what the exchange raised."""
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
