"""A progress bar with little CPU time, because the client shares its cores with the server."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


class Progress:
    """Counts items and draws the bar once a second. Without a console it draws nothing."""

    def __init__(self, console: "Console | None" = None):
        self._console = console
        self._bar: Bar | None = None
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

        names, notes = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        columns = (names, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), notes)
        with Bar(*columns, console=self._console, refresh_per_second=1, transient=True) as bar:
            bar.add_task(title, total=total, completed=done, note=note())
            self._bar, self._note = bar, note
            try:
                yield
            finally:
                self._bar = None

    def advance(self) -> None:
        """Count one item."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, note=self._note())
