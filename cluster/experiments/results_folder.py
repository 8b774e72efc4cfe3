"""The folder of an experiment's results: one writer, one experiment, a line per ended run, nothing lost.

experiment.yaml   the file as it was run
experiment.json   identity of the experiment, hardware, versions, commit
results.jsonl     a line for each ended run, failed runs included
runs/001-r1/      run.json with everything about a run, config.yaml, logs
engines/01/       logs of each start
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import IO, Any

from cluster.experiments.plan import RunKey

RESULTS = "results.jsonl"
HEAD = "experiment.json"
NEEDED = ("identity", "title", "kind", "repeats", "report", "origin", "axes", "names", "cells")
LEAST_FREE_BYTES = 32 * 2**20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
Line = dict[str, Any]


class FolderError(ValueError):
    """The folder cannot be used; the message has the reason and a remedy."""


class ResultsFolder:
    """The results of one experiment; `open` it before anything is written."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def runs(self) -> Path:
        """The folders of runs."""
        return self.path / "runs"

    @contextmanager
    def open(self, head: Line, source: Path) -> Iterator[None]:
        """Hold the folder for this process while the block runs. Raises FolderError."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / ".lock", f"the folder {self.path}"):
            self.check_owner(head)
            free = shutil.disk_usage(self.path).free
            if free < LEAST_FREE_BYTES:
                raise FolderError(
                    f"{self.path}: {free // 2**20} MiB are free on its disk, expected at least "
                    f"{LEAST_FREE_BYTES // 2**20}"
                )
            with disk_errors(self.path):
                write_json(self.path / HEAD, head)
                (self.path / "experiment.yaml").write_bytes(source.read_bytes())
                self._cut_torn_line()
            yield

    def append(self, line: Line) -> None:
        """Add a line for good; a line that the disk has no room for leaves no part of it."""
        path = self.path / RESULTS
        data = (json.dumps(_finite(line), allow_nan=False) + "\n").encode()
        size = path.stat().st_size if path.exists() else 0
        with disk_errors(self.path), path.open("ab") as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, size)
                raise

    def lines(self) -> list[Line]:
        """Return the last line of each run, in order of the cells; a torn last line is ignored."""
        return read_lines(self.path)

    def done(self) -> set[RunKey]:
        """Return the runs that ended without an error."""
        return {run_key(line) for line in self.lines() if line["error"] is None}

    def check_owner(self, head: Line) -> None:
        """Raise FolderError if the folder has other files, or results of another experiment."""
        path = self.path / HEAD
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise FolderError(f"{self.path} is no folder; choose one with --output")
        if not path.exists():
            others = [child.name for child in self.path.iterdir() if child.name != ".lock"]
            if others:
                raise FolderError(
                    f"{self.path} has files of something else ({', '.join(sorted(others)[:3])}); "
                    "choose another folder with --output"
                )
            return
        kept = read_head(self.path)
        if kept["identity"] != head["identity"]:
            raise FolderError(
                f"{self.path} has the results of another experiment ({kept['title']!r}, cells or workload differ); "
                "choose another folder with --output, or remove it"
            )

    def _cut_torn_line(self) -> None:
        """Remove the part of a line that a killed process has left, so that the next line begins a line."""
        path = self.path / RESULTS
        if not path.exists():
            return
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def read_head(folder: Path) -> Line:
    """Return experiment.json. Raises FolderError."""
    try:
        head: Line = json.loads((folder / HEAD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"{folder} has no results of an experiment: {error}") from None
    missing = [key for key in NEEDED if not isinstance(head, dict) or key not in head]
    if missing:
        raise FolderError(
            f"{folder} has no results of an experiment: {HEAD} lacks {', '.join(missing)}"
        )
    return head


def read_lines(folder: Path) -> list[Line]:
    """Return the last line of each run of a folder, in order of cells and repeats."""
    path = folder / RESULTS
    if not path.exists():
        return []
    found: dict[RunKey, Line] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            line = json.loads(text)
            found[run_key(line)] = line
        except (ValueError, KeyError, TypeError) as error:
            raise FolderError(
                f"{path}, line {number} is no result of a run ({type(error).__name__}: {error}); "
                "remove the line, and the same command runs that run again"
            ) from None
    return [found[key] for key in sorted(found)]


def run_key(line: Line) -> RunKey:
    """Return the run of a line."""
    return line["cell"], line["repeat"]


def write_json(path: Path, value: Any) -> None:
    """Write a file as a whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def _finite(value: Any) -> Any:
    """Return plain data with `inf` as text, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into FolderError."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise FolderError(
                f"{folder}: the disk is full. Ended runs are kept; free some space, and the same command continues"
            ) from error
        raise FolderError(f"{folder}: {error.strerror or error}") from error


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file while the block runs; the system releases it with the process. Raises FolderError."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file: IO[str] = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "of another user"
            raise FolderError(
                f"{what} is in use by another experiment, process {holder}; wait for its end"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
