"""A progress bar on stderr that costs next to nothing: the client shares its cores with the server."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

REFRESH_S = 1.0


class Progress:
    """Counts answers. Draws at most once a second, and only when asked to."""

    def __init__(self, shown: bool):
        self._shown = shown
        self._drawn_at = 0.0
        self._done = 0
        self._bar = None

    @classmethod
    def for_terminal(cls, wanted: bool = True) -> "Progress":
        """One that draws if stderr is a terminal."""
        return cls(wanted and sys.stderr.isatty())

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[None]:
        """A bar of `total` answers, while the block runs."""
        if not self._shown:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Bar(
            *columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
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
        """One more answer."""
        self._done += 1
        now = time.perf_counter()
        if self._bar is None or now - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = now
        bar, task = self._bar
        bar.update(task, completed=self._done)
        bar.refresh()
