"""`phalanx check --run`: starts a process in each rank's place that checks and times the all-to-all. Loads no model.

The processes are those of `workers.rank.exchange_probe`, on all nodes of the configuration.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.commands.start import ServerError, start_ray
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_rank_config
from kernels.all2all.deepep_limits import MAX_TOKENS_LOW_LATENCY
from kernels.interface.backend import BackendShape
from kernels.interface.registry import ALL2ALL, backend_class
from workers.config import RankConfig
from workers.models.registry import configured_model
from workers.rank.backend_choice import backend_shape
from workers.rank.exchange_check import Measured
from workers.rank.exchange_probe import ExchangeProbe, formats
from workers.rank.rank_info import Rendezvous

PLACE_S, JOIN_S, RUN_S = 60.0, 120.0, 240.0
DEEPEP = "deepep"


@dataclass(frozen=True)
class ExchangeRow:
    """One number of rows: times of the slowest rank, rates of all rows that a rank sends to other ranks."""

    num_tokens: int
    layout: str
    dispatch_us: float
    combine_us: float
    dispatch_gb_s: float
    combine_gb_s: float
    error: float
    wrong: str


@dataclass(frozen=True)
class ExchangeReport:
    """One all-to-all with one format of rows."""

    all2all: str
    fp8: bool
    num_ranks: int
    num_nodes: int
    rows: list[ExchangeRow]

    @property
    def errors(self) -> list[str]:
        """What differs from the reference."""
        format_ = " in FP8" if self.fp8 else ""
        return [
            f"{self.all2all}{format_}, {row.num_tokens} rows a rank: {row.wrong}"
            for row in self.rows
            if row.wrong
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def check_exchange(config: PhalanxConfig) -> list[ExchangeReport]:
    """Run the all-to-all of the configuration on its ranks.

    `deepep` are all modes of DeepEP that can carry the ranks. Raises ValueError if none can run, ServerError if the
    processes do not start or fail.
    """
    if config.pool:
        raise ValueError("pool: --run checks the all-to-all of one group; set pool to []")
    import ray

    start_ray(config)
    try:
        from cluster.supervisor import placement

        rank_config = resolve_rank_config(config, num_gpus=placement.num_gpus() or None)
        model = configured_model(config.model)
        shape = replace(backend_shape(rank_config, model), expert_adapters=False)
        shapes = fitting(config.kernels.all2all, shape)
        return _on_ranks(config, rank_config, shapes)
    finally:
        ray.shutdown()


def fitting(name: str, shape: BackendShape) -> dict[str, BackendShape]:
    """Return the all-to-alls that `name` stands for, each with the shape that it carries, best first.

    A mode with a limit of rows gets steps of that limit. Raises ValueError with all reasons if none carries the ranks.
    """
    if shape.num_ranks == 1:
        raise ValueError(
            "cluster.ranks is 1, so there is no all-to-all to run; set it to 2 or more"
        )
    if name == DEEPEP:
        names = [other for other in ALL2ALL if other.startswith(DEEPEP)]
    elif name == "auto":
        names = [x for x in ALL2ALL if backend_class("all2all", x).auto_reason(shape) is not None]
    else:
        names = [name]
    small = replace(shape, max_num_tokens=min(shape.max_num_tokens, MAX_TOKENS_LOW_LATENCY))
    found, reasons = {}, []
    for one in names:
        backend = backend_class("all2all", one)
        if shape.device not in backend.devices:
            reasons.append(f"{one} runs on {' and '.join(backend.devices)} alone")
            continue
        fits = [x for x in (shape, small) if backend.unsupported_reason(x) is None]
        if fits:
            found[one] = fits[0]
        else:
            reasons.append(f"{one}: {backend.unsupported_reason(small)}")
    if not found:
        raise ValueError(f"kernels.all2all: {'; '.join(reasons)}")
    return found


def _on_ranks(
    config: PhalanxConfig, rank_config: RankConfig, shapes: dict[str, BackendShape]
) -> list[ExchangeReport]:
    import ray
    from ray.util.placement_group import remove_placement_group

    from cluster.supervisor import placement
    from cluster.supervisor.failures import failure_message

    joined = config.cluster.ray_address is not None
    place, actors = None, []
    try:
        if not joined:
            placement.check_gpus(rank_config, placement.nodes())
        place = placement.create(rank_config, f"check-{secrets.token_hex(8)}")
        placement.wait_ready(rank_config, place, PLACE_S)
        actors = _actors(rank_config, place, joined=joined)
        _join(rank_config, actors)
        runs = list(_runs(actors[0], config.kernels.all2all, shapes))
        found = [_run(actors, rank_config, *run) for run in runs]
        _gather([actor.leave.remote() for actor in actors], JOIN_S)
        return found
    except ServerError:
        raise
    except Exception as error:
        raise ServerError(f"the all-to-all cannot be run: {failure_message(error)}") from error
    finally:
        for actor in actors:
            ray.kill(actor)
        if place is not None:
            remove_placement_group(place)


def _actors(config: RankConfig, place: Any, *, joined: bool) -> list[Any]:
    """Start a process in the place of each rank, in rank order."""
    import ray

    from cluster.supervisor import placement
    from cluster.supervisor.launcher import rank_environment

    environment = rank_environment(config, joined=joined)
    actor_class: Any = ray.remote(ProbeActor)
    started = []
    for rank in config.dims.ranks():
        options = placement.actor_options(config, place, config.dims.node(rank))
        options["max_concurrency"] = 1
        if environment:
            options["runtime_env"] = {"env_vars": environment}
        started.append(actor_class.options(**options).remote(rank, config))
    return started


class ProbeActor(ExchangeProbe):
    """The Ray actor around it."""

    def __init__(self, rank: int, config: RankConfig):
        from workers.rank.actor import node_address

        super().__init__(rank, config, node_address())

    def describe(self) -> dict[str, Any]:
        """Return the place of this process, as `RankActor.describe` does."""
        import os

        import ray

        from kernels.host.processes import start_ticks

        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "address": self._address,
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
            "gpu_ids": ray.get_gpu_ids(),
        }


def _join(config: RankConfig, actors: Sequence[Any]) -> None:
    """Let the processes join a group."""
    from cluster.supervisor import placement

    facts = _gather([actor.describe.remote() for actor in actors], JOIN_S)
    locations = [placement.located(rank, own) for rank, own in enumerate(facts)]
    placement.verify(locations, config)
    ((host, port),) = _gather([actors[0].host_rendezvous.remote()], JOIN_S)
    name = f"check-{secrets.token_hex(16)}"
    rendezvous = Rendezvous(host, port, name, secret=secrets.token_bytes(32), store=name)
    calls = [
        actor.join.remote(rendezvous, placement.visible_gpus(locations, own))
        for actor, own in zip(actors, locations, strict=True)
    ]
    _gather(calls, JOIN_S)


def _runs(
    first: Any, name: str, shapes: dict[str, BackendShape]
) -> Iterator[tuple[str, BackendShape, bool]]:
    """Yield each all-to-all, its shape and its format of rows that the machine of rank 0 can run."""
    refused = []
    for one, shape in shapes.items():
        (reason,) = _gather([first.refusal.remote(one)], JOIN_S)
        if reason is not None:
            refused.append(f"{one}: {reason}")
            continue
        yield from ((one, shape, fp8) for fp8 in formats(one, shape))
        if name == "auto":
            return
    if len(refused) == len(shapes):
        raise ServerError(f"no rank can run it here: {'; '.join(refused)}")


def _run(
    actors: Sequence[Any], config: RankConfig, name: str, shape: BackendShape, fp8: bool
) -> ExchangeReport:
    calls = [actor.run.remote(name, shape, fp8=fp8) for actor in actors]
    of_ranks: list[list[Measured]] = _gather(calls, RUN_S)
    rows = [merged(of_size) for of_size in zip(*of_ranks, strict=True)]
    return ExchangeReport(name, fp8, config.num_ranks, config.num_nodes, rows)


def merged(of_ranks: Sequence[Measured]) -> ExchangeRow:
    """Return the figures of all ranks: the slowest rank's times, the mean of the bytes, every error."""
    dispatch_s = max(own.dispatch_s for own in of_ranks)
    combine_s = max(own.combine_s for own in of_ranks)
    num_bytes = sum(own.sent_bytes for own in of_ranks) / len(of_ranks)
    wrong = [f"rank {rank}: {own.wrong}" for rank, own in enumerate(of_ranks) if own.wrong]
    return ExchangeRow(
        num_tokens=of_ranks[0].num_tokens,
        layout=of_ranks[0].layout,
        dispatch_us=1e6 * dispatch_s,
        combine_us=1e6 * combine_s,
        dispatch_gb_s=num_bytes / dispatch_s / 1e9,
        combine_gb_s=num_bytes / combine_s / 1e9,
        error=max(own.error for own in of_ranks),
        wrong="; ".join(wrong),
    )


def _gather(calls: list[Any], timeout_s: float) -> list[Any]:
    """Return the results, or raise the first error; ServerError after `timeout_s`."""
    import ray
    from ray.exceptions import GetTimeoutError

    waiting = list(calls)
    try:
        while waiting:  # the error of one rank ends the wait for ranks that wait for it
            done, waiting = ray.wait(waiting, timeout=timeout_s)
            if not done:
                raise ServerError(f"the ranks took longer than {timeout_s:g} s")
            ray.get(done)
        return list(ray.get(calls))
    except GetTimeoutError as error:
        raise ServerError(f"the ranks took longer than {timeout_s:g} s") from error


def render_exchange(reports: Sequence[ExchangeReport], console: Console) -> None:
    """Print a table for each all-to-all and format, then the errors."""
    for report in reports:
        format_ = ", rows in FP8" if report.fp8 else ""
        hosts = f"{report.num_nodes} host{'s' * (report.num_nodes > 1)}"
        title = f"{report.all2all}{format_}: {report.num_ranks} ranks on {hosts}"
        console.print(_table(title, report.rows))
    errors = list(chain.from_iterable(report.errors for report in reports))
    for error in errors:
        console.print(f"error: {error}", style="red")
    if not errors:
        console.print("dispatch and combine agree with the reference", style="bold")


def _table(title: str, rows: Sequence[ExchangeRow]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("rows a rank", justify="right")
    table.add_column("layout")
    for name in ("dispatch", "combine", "dispatch", "combine", "largest error"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.num_tokens:,}",
            row.layout,
            f"{row.dispatch_us:,.0f} us",
            f"{row.combine_us:,.0f} us",
            f"{row.dispatch_gb_s:.1f} GB/s",
            f"{row.combine_gb_s:.1f} GB/s",
            f"{row.error:.1e}",
        )
    return table
