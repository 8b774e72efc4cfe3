"""`phalanx trace`: brings the ranks up as `serve` does, runs steps of one size whole and in slices, and draws them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from cluster.commands import trace_drawing
from cluster.config.phalanx_config import PhalanxConfig
from workers.trace.spans import RankTrace, Schedule

Phase = Literal["prefill", "decode"]
TOKENS = {"prefill": 1024, "decode": 32}
HOST_BOUND = 0.9  # of a step that its launch takes: then the device waits for the host


def trace(
    config: PhalanxConfig,
    phase: Phase,
    num_tokens: int | None,
    prefix: Path,
    num_layers: int,
    say: Callable[[str], Any],
) -> None:
    """Write `prefix`.png, with so many layers, and .json; `say` what they show. The ranks are gone afterwards.

    Raises ValueError without matplotlib, ServerError when the ranks do not start or cannot run such a step.
    """
    trace_drawing.check_matplotlib()
    num_tokens = num_tokens or TOKENS[phase]
    # Both forms are run whatever the server would choose.
    overlap = config.overlap.model_copy(update={"mode": "on"})
    config = config.model_copy(update={"overlap": overlap})
    import ray

    from cluster.commands.serve import start_ray

    start_ray(config)
    try:
        traces = _run(config, phase, num_tokens)
    finally:
        ray.shutdown()
    title = f"{phase} of {num_tokens} tokens a rank, {config.cluster.ranks} ranks, all-to-all {traces[0].all2all}"
    written = trace_drawing.write(traces, prefix, title, num_layers)
    say(title)
    for line in summary(traces):
        say(line)
    say("wrote " + " and ".join(map(str, written)))


def summary(traces: Sequence[RankTrace]) -> list[str]:
    """A line for each rank and form, and what to make of them."""
    lines = []
    for trace in traces:
        for form, unrecorded in zip(trace_drawing.FORMS, trace.unrecorded, strict=True):
            what = _figures(getattr(trace, form), unrecorded)
            lines.append(f"rank {trace.rank} {form}: {what}")
    lines.append(
        "hidden: of the time that a rank waited for an exchange or computed beside one, the share that it computed"
    )
    return lines


def _figures(schedule: Schedule, unrecorded: float) -> str:
    times = schedule.seconds, unrecorded, schedule.exposed, schedule.hidden
    recorded, unrecorded, exposed, hidden = (f"{1e3 * seconds:.2f} ms" for seconds in times)
    text = (
        f"{recorded} (unrecorded {unrecorded}), {exposed} waiting for exchanges, {hidden} computing beside them: "
        f"{100 * schedule.hidden_share:.0f} % hidden"
    )
    if (schedule.launched or 0) > HOST_BOUND * schedule.seconds:
        text += f"; the GPU waited for its host, which took {1e3 * schedule.launched:.2f} ms to launch it"
    return text


def _run(config: PhalanxConfig, phase: Phase, num_tokens: int) -> list[RankTrace]:
    import ray

    from cluster.commands.serve import ServerError
    from cluster.group.failures import failure_message
    from cluster.group.supervisor import Supervisor

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
