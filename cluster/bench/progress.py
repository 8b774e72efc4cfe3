"""A progress bar with little CPU time, because the client shares its cores with the server."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

REFRESH_S = 1.0


class Progress:
    """Counts answers and draws the bar at most once a second. Without a console it draws nothing."""

    def __init__(self, console: "Console | None" = None):
        self._console = console
        self._bar: tuple[Bar, TaskID] | None = None
        self._done = 0
        self._drawn_at = 0.0

    @classmethod
    def for_terminal(cls, wanted: bool = True) -> "Progress":
        """Return a bar that draws if stderr is a terminal."""
        if not (wanted and sys.stderr.isatty()):
            return cls()
        from rich.console import Console

        return cls(Console(stderr=True))

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[None]:
        """Show a bar of `total` answers while the block runs."""
        if self._console is None:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        # No refresh by itself: that is a thread which wakes ten times a second.
        bar = Bar(
            *columns,
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._done = 0
        with bar:
            self._bar = (bar, bar.add_task(title, total=total))
            bar.refresh()
            try:
                yield
            finally:
                self._bar = None

    def advance(self) -> None:
        """Count one answer."""
        self._done += 1
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            bar, task = self._bar
            bar.update(task, completed=self._done)
            bar.refresh()
