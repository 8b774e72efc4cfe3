"""`phalanx check`: the ranks, backends and memory of a configuration on this machine. Starts and allocates nothing.

The rank table and the memory figures are arithmetic; only the backends and warnings look at the
machine.
"""

import importlib.metadata
import ipaddress
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cluster.api.tracing import check_tracing
from cluster.commands.check_adapters import check_adapters
from cluster.commands.check_backends import alternatives, probe_or_assume
from cluster.commands.check_host_memory import (
    SessionBytes,
    tier_lines,
    too_little_memory,
    transfer_unavailable,
)
from cluster.commands.check_images import images_line, videos_line
from cluster.commands.check_memory import RankRow, rank_rows, too_little_on_gpu
from cluster.commands.check_room import refuse_too_large
from cluster.commands.check_steps import (
    cascade_line,
    check_comm_sms,
    graph_line,
    never_reached,
    overlap_lines,
    slow_for_want_of_graphs,
    speculation_line,
)
from cluster.config.api_keys import VARIABLE, load_digests
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import available_cores, check_num_ranks, resolve_rank_config
from cluster.supervisor.group_spec import group_specs
from kernels.backends import select
from kernels.host.cache_folder import use_cache_folder
from workers import hub
from workers.config import ModelSection, RankConfig
from workers.models.registry import configured_model
from workers.rank.backend_choice import (
    backend_shape,
    four_bits_are_widened,
    fp8_is_not_kept,
    slow_attention,
    warnings_of_answers,
)
from workers.rank.device_memory import size
from workers.specs.model import ModelConfig


@dataclass(frozen=True)
class CheckReport:
    """Everything the command prints.

    group          its name and role; None if the server has one group
    task           what the server answers with, and how it is made of the hidden states of a prompt
    images, videos   which of them requests may have
    checkpoint     of the Hub: the model, its commit, and the branches and tags that lead there; None for a folder
    steps          what of `cuda_graphs`, ubatches, cascade and speculation comes to pass, and why
    alternatives   family to the backends that were not chosen, with why they cannot run, "" for those that could
    assumed        what could not be looked at on this machine
    """

    config: dict[str, Any]
    group: str | None
    checkpoint: str | None
    task: str
    images: str
    videos: str
    ranks: list[RankRow]
    backends: dict[str, dict[str, str]]
    steps: dict[str, str]
    tiers: dict[str, str]
    alternatives: dict[str, dict[str, str]]
    assumed: str
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        return asdict(self)


def check_groups(config: PhalanxConfig, num_api_keys: int | None = None) -> list[CheckReport]:
    """Resolve a valid configuration: a report for each group, raises as `check` does."""
    check_num_ranks(config)
    if not config.pool:
        return [check(config, num_api_keys)]
    return [
        check(spec.config, num_api_keys, group=f"{spec.name} ({spec.role})")
        for spec in group_specs(config)
    ]


def check(
    config: PhalanxConfig, num_api_keys: int | None = None, *, group: str | None = None
) -> CheckReport:
    """Resolve a valid configuration of one group; num_api_keys None = count the keys that the server would load.

    Raises BackendChoiceError for a named backend that cannot run, GraphsUnavailableError, ApiKeyError, and ConfigError
    for traces without their library, adapters, overlap.comm_sms, too large weights, or too many ranks for this machine.
    """
    use_cache_folder(config.kernels.cache)
    check_tracing(config.serve.tracing)
    check_num_ranks(config)
    if num_api_keys is None:
        num_api_keys = len(load_digests(config.serve.api_keys_file).clients)
    rank_config, model = resolve_rank_config(config), configured_model(config.model)
    check_adapters(rank_config, model)
    unavailable, assumed = probe_or_assume(rank_config.device)
    shape = backend_shape(rank_config, model)
    selection = select.select(config.kernels, unavailable, shape)
    graphs, graph_reason = graph_line(
        rank_config.scheduler,
        selection,
        rank_config.device,
        rank_config.speculation.rows_per_seq,
        decodes=model.pooling is None,
        max_rows=selection.all2all_class.graph_rows(shape),
    )
    num_ubatches, overlap = overlap_lines(config.overlap, selection)
    check_comm_sms(config.overlap, selection, num_ubatches)
    place = rank_config, model, selection, shape
    ranks = rank_rows(*place, num_ubatches=num_ubatches, graphs=graphs)
    session = SessionBytes.of(*place)
    if rank_config.device == "cuda":
        refuse_too_large(rank_config, model, selection, unavailable, shape, config.kernels)
    return CheckReport(
        config=_resolved_tree(config, rank_config),
        group=group,
        checkpoint=_checkpoint(config.model),
        task="generate" if model.pooling is None else str(model.pooling),
        images=images_line(config, rank_config, model),
        videos=videos_line(config, model),
        ranks=ranks,
        backends=_backend_lines(selection),
        steps={
            "cuda_graphs": graph_reason,
            **overlap,
            "cascade": cascade_line(rank_config, selection, model),
            "speculation": speculation_line(rank_config, model, ranks, session),
        },
        tiers=tier_lines(rank_config, session),
        alternatives=alternatives(selection, unavailable, shape),
        assumed=assumed,
        warnings=[
            *slow_attention(config.kernels, selection, unavailable, shape),
            *four_bits_are_widened(model, selection, unavailable, shape),
            *_warnings(config, rank_config, model, selection, ranks, num_api_keys),
            *too_little_memory(rank_config, session, available_memory()),
            *transfer_unavailable(rank_config),
        ],
    )


def _backend_lines(selection: select.Selection) -> dict[str, dict[str, str]]:
    return {
        seam: {"name": choice.name, "reason": choice.reason}
        for seam, choice in selection.choices.items()
    }


def _checkpoint(model: ModelSection) -> str | None:
    if model.revision is None:
        return None
    revisions = hub.revisions(model.path, model.revision)
    names = f" ({', '.join(revisions)})" if revisions else ""
    return f"{model.path}, commit {model.revision}{names}"


def _resolved_tree(config: PhalanxConfig, rank_config: RankConfig) -> dict[str, Any]:
    tree = config.model_dump()
    tree["model"] = rank_config.model.model_dump()
    tree["scheduler"] = rank_config.scheduler.model_dump()
    tree["cache"] = rank_config.cache.model_dump()
    tree["cluster"] |= {"device": rank_config.device, "threads_per_rank": rank_config.threads}
    return tree


def _warnings(
    config: PhalanxConfig,
    rank_config: RankConfig,
    model: ModelConfig,
    selection: select.Selection,
    ranks: list[RankRow],
    num_api_keys: int,
) -> Iterator[str]:
    per_node = rank_config.dims.ranks_per_node
    if rank_config.device == "cuda":
        found = torch.cuda.device_count()
        if found < per_node:
            yield (
                f"cluster.device is cuda with {per_node} rank(s) a node, this machine has {found} "
                "GPU(s); backends are chosen as if they were there"
            )
        if too_little := too_little_on_gpu(rank_config, ranks):
            yield too_little
        yield from slow_for_want_of_graphs(rank_config.scheduler, selection)
        yield from fp8_is_not_kept(model, selection)
    else:
        yield from _cpu_warnings(rank_config, ranks[:per_node])
    yield from never_reached(config.overlap, rank_config.scheduler)
    yield from warnings_of_answers(config.model, model)
    if rank_config.num_ranks > model.num_experts:
        yield (
            f"cluster.ranks is {rank_config.num_ranks} for {model.num_experts} experts: "
            f"{rank_config.num_ranks - model.num_experts} rank(s) hold none"
        )
    if rank_config.dims.alone and config.experts.rebalance != "off":
        yield f"experts.rebalance is {config.experts.rebalance} with one rank, so no expert moves"
    if not num_api_keys and not _is_loopback(config.serve.host):
        yield (
            f"serve.host is {config.serve.host}: whoever can reach this machine can use the model; "
            f"set {VARIABLE} or serve.api_keys_file to ask for a key"
        )
    version = foreign_kernels_version()
    if version is not None:
        yield (
            f"the distribution 'kernels' {version} is installed and shares its name with a package "
            "of Phalanx; transformers may then fail to import models. Run `pip uninstall kernels`, then install "
            "Phalanx again with `pip install --force-reinstall --no-deps`, because both have kernels/__init__.py"
        )


def _cpu_warnings(config: RankConfig, node_ranks: list[RankRow]) -> Iterator[str]:
    cores = available_cores()
    if config.threads * len(node_ranks) > max(cores, len(node_ranks)):
        yield (
            f"cluster.threads_per_rank {config.threads} times {len(node_ranks)} ranks a node is "
            f"more than the {cores} cores here"
        )
    needed = sum(row.fixed_bytes + (row.kv_bytes or 0) for row in node_ranks)
    available = available_memory()
    if available is not None and needed > available:
        yield (
            f"the ranks of a node need {size(needed)}, this machine has {size(available)} "
            "available; lower cache.cpu_memory_gib or cache.num_blocks"
        )


def available_memory() -> int | None:
    """Bytes that processes can still allocate on this machine; None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024


def foreign_kernels_version() -> str | None:
    """Version of the installed distribution named `kernels`, which shares its name with a package of Phalanx."""
    try:
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def render(report: CheckReport, console: Console) -> None:
    """Print a report for people."""
    if report.group is not None:
        console.print(f"group {report.group}", style="bold")
    console.print("configuration", style="bold")
    _render_tree(report.config, "  ", console)
    if report.checkpoint is not None:
        console.print(f"checkpoint: {report.checkpoint}", soft_wrap=True)
    console.print(f"task: {report.task}", soft_wrap=True)
    console.print(f"images: {report.images}", soft_wrap=True)
    console.print(f"videos: {report.videos}", soft_wrap=True)
    console.print(_rank_table(report.ranks))
    console.print("backends", style="bold")
    for family, choice in report.backends.items():
        console.print(f"  {family:<18}{choice['name']:<20}{choice['reason']}")
        for name, unsupported_reason in report.alternatives[family].items():
            console.print(f"  {'':<18}{name:<20}{unsupported_reason or 'could run'}", style="dim")
    console.print("steps", style="bold")
    for name, outcome in report.steps.items():
        console.print(f"  {name:<18}{outcome}")
    if report.tiers:
        console.print("KV outside the devices", style="bold")
        for name, outcome in report.tiers.items():
            console.print(f"  {name:<18}{outcome}")
    if report.assumed:
        console.print(f"assumed: {report.assumed}")
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _render_tree(tree: dict[str, Any], indent: str, console: Console) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            console.print(f"{indent}{key}")
            _render_tree(value, f"{indent}  ", console)
        else:
            console.print(f"{indent}{key:<32}{'null' if value is None else value}")


def _rank_table(ranks: list[RankRow]) -> Table:
    table = Table(title="ranks", title_justify="left", title_style="bold", box=None)
    for name in ("rank", "node", "device", "experts"):
        table.add_column(name)
    states = any(row.state_bytes for row in ranks)
    adapters = any(row.adapter_bytes for row in ranks)
    some = [name for name, shown in (("states", states), ("adapters", adapters)) if shown]
    columns = ("weights", "KV blocks", *some, "buffers", "ubatches")
    for name in (*columns, "graphs"):
        table.add_column(name, justify="right")
    for row in ranks:
        kv = "at start" if row.kv_bytes is None else size(row.kv_bytes)
        table.add_row(
            str(row.rank),
            str(row.node),
            row.device,
            row.experts,
            size(row.weight_bytes),
            kv,
            *((size(row.state_bytes),) if states else ()),
            *((size(row.adapter_bytes),) if adapters else ()),
            size(row.buffer_bytes),
            size(row.ubatch_bytes) if row.ubatch_bytes else "none",
            size(row.graph_bytes) if row.graph_bytes else "none",
        )
    return table
