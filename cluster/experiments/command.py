"""The commands `phalanx experiment` and `phalanx report`: read options, print, choose the exit code."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from cluster.experiments.experiment import Experiment
    from cluster.experiments.machine_check import MachineReport
    from cluster.experiments.results_folder import ResultsFolder

DEFAULT_FOLDER = Path("experiments")
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended

File = Annotated[
    Path, typer.Argument(help="Experiment file, or the name of an example.", show_default=False)
]
Folders = Annotated[list[Path], typer.Argument(help="Folders of results.", show_default=False)]
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
    from cluster.config import examples
    from cluster.config.errors import ConfigError
    from cluster.experiments import plan
    from cluster.experiments.experiment import load_experiment
    from cluster.experiments.results_folder import FolderError, ResultsFolder

    try:
        file = examples.find(file, examples.EXPERIMENTS)
    except ValueError as error:
        _fail(f"{file}: {error}")
    try:
        found = load_experiment(file, overrides or [])
    except ConfigError as error:
        _fail(str(error))
    folder = ResultsFolder(output or DEFAULT_FOLDER / file.stem)
    runs = plan.ordered_runs(found)
    try:
        folder.check_owner(found.head())
        done = folder.done()
        for line in plan.describe(found, runs, done):
            typer.echo(line)
        report = _check_machine(found, dry_run)
        if not dry_run:
            _run(found, folder, report)
    except FolderError as error:
        _fail(str(error), 1)


def report(folders: Folders) -> None:
    """Write tables and plot of a folder of results again, or compare several folders."""
    from cluster.experiments.report import compare_folders
    from cluster.experiments.results_folder import FolderError

    try:
        if len(folders) == 1:
            _write(folders[0])
        else:
            typer.echo(compare_folders(folders))
    except FolderError as error:
        _fail(str(error))


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


def _run(found: "Experiment", folder: "ResultsFolder", report: "MachineReport") -> None:
    """Run what is left, write the report, and exit with the matching code."""
    from cluster.experiments.cluster_lock import experiment_lock
    from cluster.experiments.origin import origin
    from cluster.experiments.runner import Runner

    source = origin()
    head = {**found.head(), "origin": source}
    failed, interrupted = 0, False
    with experiment_lock(found.cells[0].config), folder.open(head, found.path):
        try:
            with signals_as_ctrl_c(), _progress() as (say, show):
                start, resolved = _starter(found), report.resolved
                runner = Runner(found, folder, start, say, source, resolved, show)
                failed = runner.run()
        except KeyboardInterrupt:
            interrupted = True
        _write(folder.path)
    if interrupted:
        typer.echo("interrupted; the same command continues", err=True)
        raise typer.Exit(INTERRUPTED)
    if failed:
        typer.echo(f"error: {failed} runs failed; the same command runs them again", err=True)
        raise typer.Exit(1)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and for a closed terminal; under nohup a closed terminal ends nothing."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    wanted = [signal.SIGTERM, signal.SIGHUP]
    handled = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield functions for a line that stays and for the run that begins, which only a terminal shows."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield typer.echo, lambda text: None
        return
    # Once a second, because the spinner shares the cores with CPU ranks.
    with console.status("", refresh_per_second=1) as status:
        yield console.print, lambda text: status.update(escape(text))


def _starter(found: "Experiment") -> Any:
    if found.sections.kind == "http":
        from cluster.experiments.server_target import Server

        return Server
    from cluster.experiments.rank_group import RankGroup

    return RankGroup


def _write(folder: Path) -> None:
    """Write the tables and the plot of a folder, and print where they are."""
    from cluster.experiments import drawing
    from cluster.experiments.report import PLOT, SUMMARY, read_results, write_report

    results, plotted = read_results(folder), False
    if drawing.has_matplotlib():
        plotted = drawing.draw(results, folder / PLOT)
    else:
        typer.echo("no plot, because matplotlib is missing: pip install matplotlib", err=True)
    write_report(folder, plotted)
    files = [SUMMARY, *([PLOT] if plotted else [])]
    typer.echo("wrote " + " and ".join(str(folder / name) for name in files))


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
