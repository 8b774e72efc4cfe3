"""A progress bar with little CPU time, because the client shares its cores with the server."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

REFRESH_S = 1.0


class Progress:
    """Counts items and draws the bar at most once a second. Without a console it draws nothing."""

    def __init__(self, console: "Console | None" = None):
        self._console = console
        self._bar: tuple[Bar, TaskID] | None = None
        self._done = 0
        self._drawn_at = 0.0
        self._note: Callable[[], str] = str

    @property
    def draws(self) -> bool:
        """Whether a bar is drawn."""
        return self._console is not None

    @classmethod
    def for_terminal(cls, wanted: bool = True) -> "Progress":
        """Return a bar that draws if stderr is a terminal."""
        if not (wanted and sys.stderr.isatty()):
            return cls()
        from rich.console import Console

        return cls(Console(stderr=True))

    @contextmanager
    def stage(
        self, title: str, total: int, *, done: int = 0, note: Callable[[], str] = str
    ) -> Iterator[None]:
        """Show a bar of `total` items while the block runs, of which `done` are done; `note` is the text behind it."""
        if self._console is None:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._done, self._note = done, note
        # No refresh by itself: that is a thread which wakes ten times a second.
        bar = Bar(
            *columns,
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        with bar:
            self._bar = (bar, bar.add_task(title, total=total, completed=done, note=note()))
            bar.refresh()
            try:
                yield
            finally:
                self._bar = None

    def advance(self) -> None:
        """Count one item."""
        self._done += 1
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            bar, task = self._bar
            bar.update(task, completed=self._done, note=self._note())
            bar.refresh()
