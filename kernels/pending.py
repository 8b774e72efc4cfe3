"""`Pending`: the only way to the result of an exchange, the same for every backend."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A result under way. `wait()` blocks until it is there; a second call returns the same result."""

    def __init__(self, finish: Callable[[], T]):
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    @classmethod
    def ready(cls, result: T) -> "Pending[T]":
        """A result that needs no waiting."""
        return cls(lambda: result)

    def wait(self) -> T:
        """The result; raises what the exchange raised."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result  # type: ignore[return-value]
