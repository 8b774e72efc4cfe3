"""`phalanx trace`: start the ranks as `serve` does, and profile steps of one size whole and in ubatches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from cluster.config.phalanx_config import PhalanxConfig
from workers.rank.rank_info import RankTrace

Phase = Literal["prefill", "decode"]
TOKENS = {"prefill": 1024, "decode": 32}


def trace(
    config: PhalanxConfig,
    phase: Phase,
    num_tokens: int | None,
    prefix: Path,
    print_line: Callable[[str], Any],
) -> None:
    """Write `prefix`-rank-N.json.gz for each rank, and the times of its steps through `print_line`; stop the ranks.

    Raises ServerError if the ranks do not start or cannot run such a step.
    """
    num_tokens = num_tokens or TOKENS[phase]
    # Both forms run, whichever the server would choose.
    overlap = config.overlap.model_copy(update={"mode": "on"})
    config = config.model_copy(update={"overlap": overlap})
    import ray

    from cluster.commands import download
    from cluster.commands.start import start_ray

    prefix.parent.mkdir(parents=True, exist_ok=True)
    download.run(config)
    start_ray(config)
    try:
        traces = _run(config, phase, num_tokens)
    finally:
        ray.shutdown()
    print_line(
        f"{phase} of {num_tokens} tokens a rank, {config.cluster.ranks} ranks, all-to-all {traces[0].all2all}; "
        "times without the profiler"
    )
    for found in traces:
        path = prefix.with_name(f"{prefix.name}-rank-{found.rank}.json.gz")
        path.write_bytes(found.events)
        times = ", ".join(
            f"{form} {1e3 * seconds:.2f} ms" for form, seconds in found.seconds.items()
        )
        print_line(f"rank {found.rank}: {times}; wrote {path}")


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
