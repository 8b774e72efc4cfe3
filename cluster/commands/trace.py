"""`phalanx trace`: start the ranks as `serve` does, run steps of one size whole and in ubatches, and draw them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from cluster.commands import trace_drawing
from cluster.config.phalanx_config import PhalanxConfig
from workers.trace import hidden
from workers.trace.spans import RankTrace, StepTrace

Phase = Literal["prefill", "decode"]
TOKENS = {"prefill": 1024, "decode": 32}
HOST_BOUND = 0.9  # share of a step that its launch takes; above it the device waits for the host


def trace(
    config: PhalanxConfig,
    phase: Phase,
    num_tokens: int | None,
    prefix: Path,
    num_layers: int,
    print_line: Callable[[str], Any],
) -> None:
    """Write `prefix`.json, `prefix`.png with `num_layers` layers, and a summary through `print_line`; stop the ranks.

    Raises ValueError without matplotlib, ServerError if the ranks do not start or cannot run such a step.
    """
    trace_drawing.check_matplotlib()
    num_tokens = num_tokens or TOKENS[phase]
    # Both forms run, whichever the server would choose.
    overlap = config.overlap.model_copy(update={"mode": "on"})
    config = config.model_copy(update={"overlap": overlap})
    import ray

    from cluster.commands import download
    from cluster.commands.start import start_ray

    download.run(config)
    start_ray(config)
    try:
        traces = _run(config, phase, num_tokens)
    finally:
        ray.shutdown()
    title = f"{phase} of {num_tokens} tokens a rank, {config.cluster.ranks} ranks, all-to-all {traces[0].all2all}"
    written = trace_drawing.write(traces, prefix, title, num_layers)
    print_line(title)
    for line in summary(traces):
        print_line(line)
    print_line("wrote " + " and ".join(map(str, written)))


def summary(traces: Sequence[RankTrace]) -> list[str]:
    """Return a line for each rank and form, then the definitions of the shares."""
    lines = []
    for trace in traces:
        plain, ubatched = trace.unrecorded
        lines.append(f"rank {trace.rank} plain: {_figures(trace.plain, plain)}")
        saved = trace.saved_share
        share = "" if saved is None else f", {100 * saved:.0f} % saved"
        lines.append(f"rank {trace.rank} ubatched: {_figures(trace.ubatched, ubatched, share)}")
    return [*lines, hidden.COVERED, f"{hidden.SAVED}; here the time without compute"]


def _figures(step: StepTrace, unrecorded: float, share: str = "") -> str:
    times = step.seconds, unrecorded, step.exposed, step.covered
    recorded, unrecorded_ms, exposed, covered = (f"{1e3 * seconds:.2f} ms" for seconds in times)
    text = (
        f"{recorded} (unrecorded {unrecorded_ms}), {exposed} waiting for all-to-alls without compute, {covered} "
        f"computing beside them: {100 * step.covered_share:.0f} % covered{share}"
    )
    if step.launched is not None and step.launched > HOST_BOUND * step.seconds:
        text += (
            f"; the GPU waited for its host, which took {1e3 * step.launched:.2f} ms to launch it"
        )
    return text


def _run(config: PhalanxConfig, phase: Phase, num_tokens: int) -> list[RankTrace]:
    import ray

    from cluster.commands.start import ServerError
    from cluster.supervisor.failures import failure_message
    from cluster.supervisor.supervisor import Supervisor

    actor_class: Any = ray.remote(Supervisor)
    supervisor = actor_class.options(num_cpus=0).remote(config)
    try:
        ray.get(supervisor.prepare.remote())
        traces: list[RankTrace] = ray.get(supervisor.trace.remote(phase, num_tokens))
        return traces
    except Exception as error:
        raise ServerError(f"the ranks cannot be traced: {failure_message(error)}") from error
    finally:
        ray.get(supervisor.stop.remote())
