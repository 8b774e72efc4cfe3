"""Processes that measure one thing together, and lose nothing but their own when they fail or hang.

A group is one process per rank. Rank 0 reports results as it gets them; when a rank raises, dies or nothing is
reported for too long, the whole group is killed and what was reported until then is kept. Knows nothing of kernels.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed",
    "kernels.backends.select",
]  # imported once for all groups
POLL_S, END_S = 0.05, 10.0
Work = Callable[..., None]  # (rank, report, folder, *args); of a module, so that processes find it


@dataclass(frozen=True)
class Limits:
    """How long a group may take: seconds without a report, and time.monotonic() of the end of everything."""

    patience_s: float
    end: float


def add_limits(parser: argparse.ArgumentParser, *, patience_s: float, budget_s: float) -> None:
    """--patience and --budget."""
    help_text = "seconds that ranks may take without a result"
    parser.add_argument("--patience", type=float, default=patience_s, help=help_text)
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds of the whole run")


def limits_from_now(args: argparse.Namespace) -> Limits:
    """Of the options."""
    return Limits(args.patience, time.monotonic() + args.budget)


@dataclass(frozen=True)
class Outcome:
    """What rank 0 reported, in order, and why the group did not come to its end, None if it did."""

    reports: list[Any]
    failure: str | None

    def said(self) -> str:
        """How it ended, in words."""
        if self.failure is None:
            return "complete"
        last = json.dumps(self.reports[-1]) if self.reports else "its start"
        return f"{self.failure}, after {last}"


class Report:
    """Hands results of rank 0 to the process that waits for them; other ranks' are dropped."""

    def __init__(self, rank: int, folder: Path):
        self._path = folder / "reports" if rank == 0 else None

    def __call__(self, result: Any) -> None:
        """One line of JSON; also a sign of life."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")


def run_group(work: Work, args: Sequence[Any], num_ranks: int, limits: Limits) -> Outcome:
    """Run `work(rank, report, folder, *args)` in num_ranks new processes; `folder` is empty and the group's own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reports").touch()
        processes = [
            context.Process(target=_enter, args=(work, rank, folder, tuple(args)), daemon=True)
            for rank in range(num_ranks)
        ]
        try:
            for process in processes:
                process.start()
            failure = _watch(processes, folder, limits)
        finally:
            _end(processes)
        lines = (folder / "reports").read_text().split("\n")
        return Outcome([json.loads(line) for line in lines[:-1]], failure)  # the last may be cut


def _enter(work: Work, rank: int, folder: Path, args: tuple[Any, ...]) -> None:
    try:
        work(rank, Report(rank, folder), folder, *args)
    except BaseException as error:
        traceback.print_exc()
        said = (str(error).strip().splitlines() or [""])[0]
        _error_path(folder, rank).write_text(f"{type(error).__name__}: {said}")
        raise SystemExit(1) from None


def _watch(processes: list[BaseProcess], folder: Path, limits: Limits) -> str | None:
    """Wait for the end of all, or say why not."""
    reported, last = 0, time.monotonic()
    while any(process.exitcode != 0 for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed:
            return _reason({rank: processes[rank].exitcode for rank in failed}, folder)
        now, size = time.monotonic(), (folder / "reports").stat().st_size
        if size != reported:
            reported, last = size, now
        if now - last > limits.patience_s:
            return f"nothing came for {limits.patience_s:g} s"
        if now > limits.end:
            return "the time for the whole run was over"
        time.sleep(POLL_S)
    return None


def _reason(failed: dict[int, int | None], folder: Path) -> str:
    """Of failed ranks and their exit codes, what the first one said: the others may only have missed it."""
    said = [path for rank in failed if (path := _error_path(folder, rank)).exists()]
    if said:
        first = min(said, key=lambda path: path.stat().st_mtime_ns)
        return f"rank {first.suffix[1:]}: {first.read_text()}"
    rank, code = next(iter(failed.items()))
    return f"rank {rank}: died with {code}"


def _error_path(folder: Path, rank: int) -> Path:
    return folder / f"error.{rank}"


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join(END_S)
