"""The interface between the runner and the engines that it measures: a group of ranks, or a server."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bench.stream import Answer
from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments.planned_load import PlannedLoad
from cluster.experiments.workload_section import RequestWorkload, StepWorkload


class EngineError(RuntimeError):
    """The engine failed or took too long; it must be started again. The message has the reason."""


@dataclass(frozen=True)
class Job:
    """The work of one run.

    load   of kinds engine and http, with `workload` as its section; None for steps
    salt   keeps requests of one run from finding prefixes that another run has cached
    """

    workload: RequestWorkload | StepWorkload
    load: PlannedLoad | None
    salt: str
    seed: int


@dataclass
class Measured:
    """Answers of a load, further figures of the engine by name, and CPU seconds of a client, if there is one."""

    answers: list[Answer] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    client_cpu_s: float = 0.0


class Engine(ABC):
    """A started engine. Every method may raise EngineError, after which only `close` may be called.

    logs   the files that its processes write
    """

    logs: list[Path]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return facts of the start, such as the chosen backends."""

    def change(self, config: PhalanxConfig, start_s: float) -> None:
        """Take other settings of an epoch within `start_s` seconds, in place of a new start; see `cells.process_of`."""
        raise EngineError("this engine keeps the settings of its start")

    @abstractmethod
    def run(self, job: Job, timeout_s: float) -> Measured:
        """Run a job to its end."""

    @abstractmethod
    def close(self) -> None:
        """End all processes."""
