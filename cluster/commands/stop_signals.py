"""SIGINT and SIGTERM as a wish that the server looks at: stop at once, stop when done, or hurry up.

The handler only appends to a list: locks could be held by the very code that it interrupts.
"""

import signal
import time

POLL_S = 0.1


class StopSignals:
    """What has been asked for so far. `install` in the main thread, again whenever others may have put handlers."""

    def __init__(self) -> None:
        self._received: list[int] = []

    def install(self) -> None:
        """Take SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _frame: self._received.append(received))

    def set(self) -> None:
        """As if a signal had come, for what goes wrong."""
        self._received.append(0)

    def is_set(self) -> bool:
        """Whether to stop."""
        return bool(self._received)

    @property
    def patient(self) -> bool:
        """Whether requests under way may finish: one SIGTERM and nothing else has come."""
        return self._received == [signal.SIGTERM]

    def wait(self, seconds: float) -> bool:
        """Whether to stop, as soon as it is known, at the latest after so long."""
        deadline = time.monotonic() + seconds
        while not self._received and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.is_set()
