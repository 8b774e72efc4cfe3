"""The experiment file as pydantic sections. Knows nothing of cells and of running them."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cluster.experiments.workload_section import RequestWorkload, StepWorkload
from workers.section import Section

Kind = Literal["engine", "http", "step"]


class Sweep(Section):
    """Axes over dotted keys of the configuration, or of `workload.`. Several forms are combined with each other."""

    grid: dict[str, list[Any]] = Field(
        default_factory=dict, description="Key to values; all combinations."
    )
    paired: list[dict[str, list[Any]]] = Field(
        default_factory=list,
        description="Groups of keys; the first values of all keys of a group go together, then the second values.",
    )
    cells: list[dict[str, Any]] = Field(
        default_factory=list, alias="list", description="Cells written out, each with its keys."
    )


class Limits(Section):
    """Times after which a run is ended and recorded as failed."""

    run_s: float = Field(600.0, gt=0, description="Seconds of one run.")
    start_s: float = Field(600.0, gt=0, description="Seconds of one start of the engine.")
    total_s: float | None = Field(
        None, gt=0, description="Seconds after which no further run begins; null = no limit."
    )


class Report(Section):
    """Content of tables and plots."""

    metrics: list[str] = Field(
        default_factory=list, description="Metrics of tables and plots; empty = by the kind."
    )
    baseline: dict[str, Any] = Field(
        default_factory=dict,
        description="Values of some axes. Each cell is compared with the cell that has the baseline's values on "
        "these axes and its own values on all other axes.",
    )
    x: str | None = Field(None, description="Axis along the plots; null = chosen by the axes.")


class _Common(Section):
    """The keys of every experiment."""

    title: str = Field(min_length=1, description="One line for tables and plots.")
    question: str = Field("", description="The question that the experiment answers.")
    kind: Kind = Field(
        description="engine = requests without HTTP, http = requests to a server, step = single steps."
    )
    base: str | None = Field(
        None,
        min_length=1,
        description="Configuration, relative to this file's folder; null = the demo.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Settings of all cells, over those of `base`."
    )
    sweep: Sweep = Field(default_factory=Sweep)
    order: Literal["grid", "random", "paired"] = Field(
        "grid",
        description="grid = all repeats of a cell, then the next cell; paired = all cells by turns (A B A B); random.",
    )
    repeats: int = Field(3, ge=1, description="Runs of each cell.")
    warmup: int = Field(
        8,
        ge=0,
        description="Requests before the first run of a cell on an engine; kind step needs none.",
    )
    seed: int = Field(0, description="Of prompts, lengths, arrivals and of order: random.")
    limits: Limits = Field(default_factory=Limits)
    report: Report = Field(default_factory=Report)


class RequestExperiment(_Common):
    """An experiment of kind engine or http."""

    workload: RequestWorkload = Field(default_factory=RequestWorkload)


class StepExperiment(_Common):
    """An experiment of kind step."""

    workload: StepWorkload = Field(default_factory=StepWorkload)


Sections = RequestExperiment | StepExperiment


def sections_of(kind: Any) -> type[RequestExperiment] | type[StepExperiment]:
    """Return the model of a file with this `kind`; a wrong kind is an error of either."""
    return StepExperiment if kind == "step" else RequestExperiment


def absolute(path: str, folder: Path) -> str:
    """Return a path of the file as an absolute one."""
    return str((folder / Path(path).expanduser()).resolve())
