"""The commands `phalanx experiment` and `phalanx report`: read options, print, choose the exit code."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from cluster.experiments.experiment import Experiment
    from cluster.experiments.machine_check import MachineReport

DEFAULT_FOLDER = Path("experiments")

File = Annotated[Path, typer.Argument(help="Experiment file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one key; repeatable."),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the results; default: experiments/NAME.")
]


def experiment(
    file: File,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print and check the plan.")] = False,
    output: Output = None,
    overrides: Overrides = None,
) -> None:
    """Run the experiment of a file; the same command continues an interrupted one."""
    from cluster.config.errors import ConfigError
    from cluster.experiments import plan
    from cluster.experiments.experiment import load_experiment

    try:
        found = load_experiment(file, overrides or [])
    except ConfigError as error:
        _fail(str(error))
    runs = plan.ordered_runs(found)
    clock = plan.Clock(found.sections.kind, plan.configured_device)
    for line in plan.describe(found, runs, set(), clock.seconds(runs)):
        typer.echo(line)
    _check_machine(found, dry_run)


def _check_machine(found: "Experiment", dry_run: bool) -> "MachineReport":
    """Examine this machine; a dry run accepts a machine without the GPUs."""
    typer.echo("checking each configuration on this machine")
    from cluster.experiments.machine_check import check_cells

    report = check_cells(found.cells)
    problems = report.problems if dry_run else [*report.problems, *report.lacking]
    if problems:
        lines = [f"  {problem.key}: {problem.message}" for problem in problems]
        _fail("\n".join([f"{found.path}: cells that cannot run", *lines]))
    for problem in report.lacking[:1]:
        typer.echo(f"  not on this machine: {problem.key} {problem.message}")
    return report


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
