"""Runs the cells of an experiment: starts an engine where a key needs it, records every run, goes on after a crash.

Knows nothing of tables and plots.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.bench.settings import BenchError
from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments.cells import Cell, digest
from cluster.experiments.experiment import Experiment
from cluster.experiments.machine_load import busy_share
from cluster.experiments.metrics import error_of, metrics_of
from cluster.experiments.origin import now
from cluster.experiments.plan import Run, duration, ordered_runs
from cluster.experiments.planned_load import WARMUP, PlannedLoad, first_requests, plan_load
from cluster.experiments.results_folder import FolderError, ResultsFolder, disk_errors, write_json
from cluster.experiments.target import Engine, EngineError, Job
from cluster.experiments.workload_section import RequestWorkload

StartEngine = Callable[[PhalanxConfig, Path, float], Engine]
PrintLine = Callable[[str], None]


@dataclass
class Started:
    """An engine that runs, its folder, and what it was used for.

    digest, process   of the cell that it runs
    start_s           time of the start, or of the last change of settings
    num_changes       changes of settings since the start
    """

    engine: Engine
    digest: str
    process: str
    folder: Path
    start_s: float
    busy: float | None  # share of the cores that other processes used before the start
    warm: set[int] = field(default_factory=set)  # indices of cells
    num_changes: int = 0


class Runner:
    """Runs all runs that the folder has no result of."""

    def __init__(
        self,
        experiment: Experiment,
        folder: ResultsFolder,
        start: StartEngine,
        print_line: PrintLine,
        origin: Mapping[str, Any],
        resolved: Mapping[str, dict[str, Any]] | None = None,
        show: PrintLine = lambda text: None,
    ):
        self._experiment, self._folder = experiment, folder
        self._start, self._say = start, print_line
        self._origin = origin  # hardware, versions and commit of this call
        self._resolved = resolved or {}  # configuration without `auto`, by engine
        self._show = show  # gets the run that begins
        self._started: Started | None = None
        self._began = time.monotonic()

    def run(self) -> int:
        """Run everything that is left; return the number of runs that failed. KeyboardInterrupt ends a run at once."""
        done = self._folder.done()
        left = [run for run in ordered_runs(self._experiment) if run.key not in done]
        failed = 0
        try:
            for number, run in enumerate(left):
                if self._is_over():
                    self._say(f"limits.total_s is over: {len(left) - number} runs are left")
                    break
                num_left = len(left) - number - 1
                self._show(self._label(run, num_left))
                line = self._record(run)
                failed += line["error"] is not None
                mean_s = (time.monotonic() - self._began) / (number + 1)
                self._report(run, line, num_left, mean_s)
        finally:
            self._end_engine()
        return failed

    def _is_over(self) -> bool:
        limit = self._experiment.sections.limits.total_s
        return limit is not None and time.monotonic() - self._began > limit

    def _record(self, run: Run) -> dict[str, Any]:
        """Run one cell once and write its results, or the reason why it has none."""
        path = self._folder.runs / run.folder
        with disk_errors(self._folder.path):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        begun, error, found = time.monotonic(), None, {}
        line: dict[str, Any] = self._about(run)
        try:
            found = self._measure(run, path, line)
        except FolderError:
            raise
        except (EngineError, BenchError) as problem:
            error = str(problem)
        except Exception as problem:  # of an engine's start: the other cells go on
            error = f"{type(problem).__name__}: {problem}"
        if error is not None:
            self._end_engine()
        line |= {
            "error": error,
            "seconds": round(time.monotonic() - begun, 3),
            "metrics": {name: round(value, 6) for name, value in found.items()},
        }
        with disk_errors(self._folder.path):
            text = yaml.safe_dump(self._configuration(run.cell), sort_keys=False)
            (path / "config.yaml").write_text(text, encoding="utf-8")
            write_json(path / "run.json", line)
        self._folder.append(line)
        return line

    def _configuration(self, cell: Cell) -> dict[str, Any]:
        return self._resolved.get(cell.engine) or cell.config.model_dump(mode="json")

    def _about(self, run: Run) -> dict[str, Any]:
        cell, sections = run.cell, self._experiment.sections
        return {
            "cell": cell.index,
            "repeat": run.repeat,
            "name": cell.name,
            "settings": cell.settings,
            "kind": sections.kind,
            "seed": sections.seed,
            "config_hash": digest(self._configuration(cell)),
            "workload": cell.workload.model_dump(mode="json"),
            "date": now(),
            **{key: value for key, value in self._origin.items() if key != "date"},
            "folder": str(Path("runs") / run.folder),
        }

    def _measure(self, run: Run, path: Path, line: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of one run; enters the facts of the engine and the load in `line`."""
        sections, cell = self._experiment.sections, run.cell
        load = self._load(cell, run.repeat)
        line["workload_hash"] = None if load is None else load.digest()
        started = self._engine_for(cell)
        line["engine"] = {
            "folder": str(started.folder.relative_to(self._folder.path)),
            "start_s": round(started.start_s, 3),
            "num_changes": started.num_changes,
            "busy_before_start": started.busy,
            **started.engine.describe(),
        }
        offsets = {log: _size(log) for log in started.engine.logs}
        try:
            self._warm_up(started, cell)
            job = Job(cell.workload, load, run.folder, sections.seed + run.repeat)
            begun = time.monotonic()
            measured = started.engine.run(job, sections.limits.run_s)
            line["measured_s"] = round(time.monotonic() - begun, 4)
        finally:
            _copy_logs(offsets, path)
        if load is not None and (error := error_of(measured.answers)) is not None:
            raise EngineError(error)
        errors = Counter(answer.error for answer in measured.answers if answer.error is not None)
        if errors:
            line["request_errors"] = dict(errors)
        return metrics_of(measured, cell.workload)

    def _load(self, cell: Cell, repeat: int) -> PlannedLoad | None:
        if not isinstance(cell.workload, RequestWorkload):
            return None
        return plan_load(cell.workload, self._experiment.sections.seed, repeat)

    def _warm_up(self, started: Started, cell: Cell) -> None:
        """Run a few requests of the cell before its first run on this engine."""
        sections = self._experiment.sections
        if cell.index in started.warm or not sections.warmup:
            return
        load = self._load(cell, WARMUP)
        if load is not None:
            load = first_requests(load, sections.warmup)
            job = Job(cell.workload, load, "warm-up", sections.seed)
            started.engine.run(job, sections.limits.run_s)
        started.warm.add(cell.index)

    def _engine_for(self, cell: Cell) -> Started:
        """Return the engine of a cell: the running one if it has or takes the settings of the cell, else a new one."""
        if self._started is not None and self._takes(self._started, cell):
            return self._started
        self._end_engine()
        folder = self._new_engine_folder()
        limit = self._experiment.sections.limits.start_s
        busy = busy_share()
        begun = time.monotonic()
        self._say(f"starting an engine for: {cell.name}")
        engine = self._start(cell.config, folder, limit)
        seconds = time.monotonic() - begun
        busy = None if busy is None else round(busy, 2)
        self._started = Started(engine, cell.engine, cell.process, folder, seconds, busy)
        return self._started

    def _takes(self, started: Started, cell: Cell) -> bool:
        """Whether the engine has the settings of a cell, or could change to them. After an error a start is tried."""
        if started.digest == cell.engine:
            return True
        if started.process != cell.process:
            return False
        begun = time.monotonic()
        try:
            started.engine.change(cell.config, self._experiment.sections.limits.start_s)
        except EngineError as error:
            self._say(f"the engine did not take the settings of {cell.name}: {error}")
            return False
        started.start_s = time.monotonic() - begun
        started.digest, started.warm = cell.engine, set()
        started.num_changes += 1
        return True

    def _new_engine_folder(self) -> Path:
        engines = self._folder.path / "engines"
        with disk_errors(self._folder.path):
            engines.mkdir(exist_ok=True)
            number = len(list(engines.iterdir())) + 1
            folder = engines / f"{number:03d}"
            folder.mkdir()
        return folder

    def _end_engine(self) -> None:
        if self._started is not None:
            started, self._started = self._started, None
            started.engine.close()

    def _report(self, run: Run, line: dict[str, Any], num_left: int, mean_s: float) -> None:
        """Print the outcome of a run. mean_s: seconds of a run so far, with the starts of engines."""
        if line["error"] is None:
            outcome = f"{line['measured_s']:.1f} s"
            if (num_failed := sum(line.get("request_errors", {}).values())) > 0:
                outcome += f", {num_failed} requests failed"
        else:
            outcome = f"FAILED: {line['error'].splitlines()[0]}"
        rest = f", about {duration(num_left * mean_s)} left" if num_left else ""
        self._say(f"{self._label(run, num_left)}: {outcome}{rest}")

    def _label(self, run: Run, num_left: int) -> str:
        """Return the number and the name of a run; `num_left` runs follow it."""
        total = len(self._experiment.cells) * self._experiment.sections.repeats
        return f"[{total - num_left}/{total}] {run.cell.name}, repeat {run.repeat}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _copy_logs(offsets: dict[Path, int], folder: Path) -> None:
    """Copy what was logged since `offsets` into the folder of a run."""
    for log, offset in offsets.items():
        if _size(log) <= offset:
            continue
        with disk_errors(folder), log.open("rb") as file:
            file.seek(offset)
            (folder / log.name).write_bytes(file.read())
