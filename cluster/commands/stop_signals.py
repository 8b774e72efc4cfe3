"""SIGINT and SIGTERM as a state that the server polls: stop at once, or stop when requests have finished.

The handler only appends to a list, because the code that it interrupts may hold locks.
"""

import signal
import time

POLL_S = 0.1


class StopSignals:
    """The signals so far. Call `install` in the main thread, again after a library may have replaced the handlers."""

    def __init__(self) -> None:
        self._received: list[int] = []

    def install(self) -> None:
        """Handle SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _frame: self._received.append(received))

    def set(self) -> None:
        """Stop as after a signal, because of an error."""
        self._received.append(0)

    def is_set(self) -> bool:
        """Whether the server must stop."""
        return bool(self._received)

    @property
    def patient(self) -> bool:
        """Whether open requests may finish: the only signal was one SIGTERM."""
        return self._received == [signal.SIGTERM]

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, for at most `seconds`; returns whether the server must stop."""
        deadline = time.monotonic() + seconds
        while not self._received and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.is_set()
