"""Lets reads of KV from another node wait in the middle of a fetch. Imported in processes that run NIXL."""

import time
from pathlib import Path
from typing import Any

from workers.kv_transfer.kv_pull import Pull


def hold_reads(folder: str, *, after: int = 0) -> None:
    """Let a read wait for a file `go` in `folder`, once the source has answered, where there is a file `hold`.

    A read that waits makes a file `held`. `after`: contents that the fetch has brought before.
    """
    read, place = Pull._read, Path(folder)

    def waits(self: Pull, *arguments: Any) -> None:
        if len(self.result.done) >= after and (place / "hold").exists():
            (place / "held").touch()
            while not (place / "go").exists():
                time.sleep(0.01)
        read(self, *arguments)

    Pull._read = waits  # type: ignore[method-assign]


class HeldReads:
    """The side of the test: the files in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def hold(self) -> None:
        """Let the next reads wait."""
        for name in ("held", "go"):
            (self._folder / name).unlink(missing_ok=True)
        (self._folder / "hold").touch()

    @property
    def held(self) -> bool:
        """Whether a read waits."""
        return (self._folder / "held").exists()

    def go(self) -> None:
        """Let the reads go on."""
        (self._folder / "hold").unlink()
        (self._folder / "go").touch()
