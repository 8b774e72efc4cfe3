"""An experiment over a tiny checkpoint, and an engine that answers at once and can be made to fail."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pytest import MonkeyPatch

from cluster.bench.stream import Answer
from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments import machine_load
from cluster.experiments.experiment import Experiment, load_experiment
from cluster.experiments.results_folder import ResultsFolder
from cluster.experiments.runner import Runner
from cluster.experiments.target import Engine, EngineError, Job, Measured
from tests.checkpoints.writer import make_checkpoint

ORIGIN: dict[str, Any] = {
    "date": "2026-01-01",
    "hardware": {"cpu": "test", "cores": 2, "gpus": []},
    "versions": {"torch": "2"},
    "commit": "abc",
}


def make_base(folder: Path) -> Path:
    """A folder with a checkpoint and base.yaml."""
    make_checkpoint(folder / "tiny", num_layers=1, hidden_size=32, num_experts=5)
    (folder / "base.yaml").write_text("model: {path: tiny}\ncluster: {ranks: 1, device: cpu}\n")
    return folder


def write(folder: Path, **keys: object) -> Path:
    """An experiment file."""
    values = {"title": "Test", "kind": "engine", "base": "base.yaml", **keys}
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@dataclass
class FakeEngines:
    """Starts engines; `before_run` may raise in place of one. An answer has its tokens, one each millisecond.

    failed_requests: the first requests of each run that fail
    """

    before_run: Callable[[Job], None] = lambda job: None
    failed_requests: int = 0
    refused_changes: int = 0  # the first ones
    changes: list[PhalanxConfig] = field(default_factory=list)
    starts: list[PhalanxConfig] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    num_open: int = 0

    def start(self, config: PhalanxConfig, folder: Path, start_s: float) -> Engine:
        self.starts.append(config)
        self.num_open += 1
        assert self.num_open == 1, "one engine at a time"
        return _FakeEngine(self, config, folder)


class _FakeEngine(Engine):
    def __init__(self, engines: FakeEngines, config: PhalanxConfig, folder: Path):
        self._engines, self._ranks = engines, config.cluster.ranks
        self.logs = [folder / "log"]

    def describe(self) -> dict[str, Any]:
        return {"fake": True}

    def change(self, config: PhalanxConfig, start_s: float) -> None:
        self._engines.changes.append(config)
        if len(self._engines.changes) <= self._engines.refused_changes:
            raise EngineError("not now")

    def run(self, job: Job, timeout_s: float) -> Measured:
        self._engines.jobs.append(job)
        with self.logs[0].open("a") as log:
            log.write(f"{job.salt}\n")
        self._engines.before_run(job)
        assert job.load is not None
        answers = []
        for request in job.load.requests:
            times = [0.001 * (1 + token) / self._ranks for token in range(request.max_tokens)]
            answer = Answer(0.0, times[-1], times, len(request.prompt), request.max_tokens)
            if len(answers) < self._engines.failed_requests:
                answer.error = "out of luck"
            answers.append(answer)
        return Measured(answers, {"steps": 3.0})

    def close(self) -> None:
        self._engines.num_open -= 1


def run_with(engines: FakeEngines, path: Path, out: Path, *overrides: str) -> int:
    """Run a file as the command does; return the number of failed runs."""
    found = load_experiment(path, overrides)
    folder = ResultsFolder(out)
    with folder.open(head_of(found), path), MonkeyPatch.context() as patch:
        patch.setattr(machine_load, "SAMPLE_S", 0.0)  # of each start of an engine
        runner = Runner(found, folder, engines.start, lambda text: None, ORIGIN)
        return runner.run()


def head_of(found: Experiment) -> dict[str, Any]:
    """experiment.json of a machine that never changes."""
    return {**found.head(), "origin": ORIGIN}
