"""`phalanx trace`: brings the ranks up as `serve` does, runs steps of one size whole and in slices, and draws them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from cluster import trace_drawing
from cluster.config import PhalanxConfig
from workers.schedule import RankTrace, hidden_share

Phase = Literal["prefill", "decode"]
TOKENS = {"prefill": 1024, "decode": 32}


def trace(
    config: PhalanxConfig, phase: Phase, num_tokens: int | None, prefix: Path, say: Callable
) -> None:
    """Write `prefix`.png and .json, and `say` what they show. The ranks are gone afterwards.

    Raises ValueError without matplotlib, ServerError when the ranks do not start or cannot run such a step.
    """
    trace_drawing.check_matplotlib()
    num_tokens = num_tokens or TOKENS[phase]
    # Both forms are run whatever the server would choose.
    overlap = config.overlap.model_copy(update={"mode": "on"})
    config = config.model_copy(update={"overlap": overlap})
    import ray

    from cluster.serve import start_ray

    start_ray(config)
    try:
        traces = _run(config, phase, num_tokens)
    finally:
        ray.shutdown()
    title = f"{phase} of {num_tokens} tokens a rank, {config.cluster.ranks} ranks, all-to-all {traces[0].all2all}"
    written = trace_drawing.write(traces, prefix, title)
    say(title)
    for line in summary(traces):
        say(line)
    say("wrote " + " and ".join(map(str, written)))


def summary(traces: Sequence[RankTrace]) -> list[str]:
    """A line for each rank: times of both forms, and how much of the communication is hidden."""
    return [
        f"rank {t.rank}: whole {1e3 * t.plain.seconds:.2f} ms, {1e3 * t.plain.exposed:.2f} of them communication; "
        f"in slices {1e3 * t.microbatched.seconds:.2f} ms, {1e3 * t.microbatched.exposed:.2f} communication; "
        f"{100 * hidden_share(t.plain, t.microbatched):.0f} % hidden"
        for t in traces
    ]


def _run(config: PhalanxConfig, phase: Phase, num_tokens: int) -> list[RankTrace]:
    import ray

    from cluster.serve import ServerError
    from cluster.supervisor import Supervisor, why

    supervisor = ray.remote(Supervisor).options(num_cpus=0).remote(config)
    try:
        ray.get(supervisor.prepare.remote())
        return ray.get(supervisor.trace.remote(phase, num_tokens))
    except Exception as error:
        raise ServerError(f"the ranks cannot be traced: {why(error)}") from error
    finally:
        ray.get(supervisor.stop.remote())
