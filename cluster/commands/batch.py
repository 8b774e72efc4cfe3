"""`phalanx batch`: run the requests of a file on ranks that this process starts."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cluster.bench.progress import Progress
from cluster.commands.stop_signals import StopSignals
from cluster.config.phalanx_config import PhalanxConfig
from cluster.offline.batch import BatchRun, LocalServer
from cluster.offline.batch_input import BatchError, BatchInput
from cluster.offline.batch_output import BatchOutput
from workers.log import set_up_logging

ALL_ANSWERED, FAILED, WRONG, WITH_ERRORS, STOPPED = 0, 1, 2, 3, 130


@dataclass(frozen=True)
class BatchOptions:
    """The options of the command.

    concurrency  requests in flight; None = twice the sequences that the ranks run at once
    """

    input: Path
    output: Path
    config: PhalanxConfig
    concurrency: int | None
    progress: bool


def run_batch(options: BatchOptions) -> int:
    """Run the batch, print its state to stderr, and return the exit code.

    0: each line has an answer. 1: the ranks failed. 2: the files do not fit. 3: each line has a result,
    and some are errors. 130: a signal ended the batch. After 1 and 130 the same command resumes.

    Raises ServerError, ConfigError and BackendChoiceError when the ranks do not start.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    stop = StopSignals()
    stop.install()
    set_up_logging("batch", options.config.serve.log_level, options.config.serve.log_format)
    try:
        lines = BatchInput(options.input)
        output = BatchOutput(options.output)
    except BatchError as error:
        console.print(f"error: {error}", markup=False)
        return WRONG
    try:
        run = BatchRun(lines, output, Progress.for_terminal(options.progress))
    except BatchError as error:
        console.print(f"error: {error}", markup=False)
        return WRONG
    else:
        return _run(run, options, stop, console)
    finally:
        output.close()


def _run(run: BatchRun, options: BatchOptions, stop: StopSignals, console: Console) -> int:
    try:
        if not run.complete:
            _answer(run, options, stop, console)
    except BatchError as error:
        console.print(f"error: {error}", markup=False)
        console.print(f"{run.summary}; the same command resumes")
        return FAILED
    if not run.complete:
        console.print(f"stopped: {run.summary}; the same command resumes")
        return STOPPED
    console.print(f"{run.summary}; see {options.output}", markup=False)
    return WITH_ERRORS if run.num_errors else ALL_ANSWERED


def _answer(run: BatchRun, options: BatchOptions, stop: StopSignals, console: Console) -> None:
    """Answer lines until all have a result, or a signal."""
    from cluster.offline.engine import OfflineEngine, StoppedError

    try:
        engine = OfflineEngine(options.config, console, stop)
    except StoppedError:
        return
    try:
        server = LocalServer(engine.dispatcher, engine.client)
        concurrency = options.concurrency or engine.concurrency
        engine.run(run.run(server, concurrency, stop.is_set))
    finally:
        engine.close()
