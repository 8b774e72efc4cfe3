"""`phalanx check`: what a configuration comes to on this machine. Starts nothing, allocates nothing.

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

from cluster.api_keys import VARIABLE, load_digests
from cluster.check_backends import alternatives, capabilities
from cluster.config import PhalanxConfig, available_cores, resolve_rank_config
from cluster.tracing import check_tracing
from kernels import select
from kernels.placement import ExpertPlacement
from workers.config import RankConfig, not_for_answers
from workers.kernel_choice import kernel_shape
from workers.models.config import Qwen3MoeConfig, load_model_config
from workers.models.tensors import kv_block_bytes, rank_weight_bytes

INT64 = 8
MEGABYTE = 10**6


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank: where it runs, which experts it holds, what it keeps in memory.

    `kv_bytes` is None where the size is measured when the rank starts. `graph_bytes` is what the CUDA graphs' common
    pool of memory takes, 0 without graphs; what CUDA itself keeps for each graph is measured at the start.
    """

    rank: int
    node: int
    device: str
    experts: str
    weight_bytes: int
    kv_bytes: int | None
    buffer_bytes: int
    graph_bytes: int


@dataclass(frozen=True)
class CheckReport:
    """Everything the command prints.

    alternatives   family to the backends that were not chosen, with why they cannot run, "" for those that could
    assumed        what could not be looked at on this machine
    """

    config: dict[str, Any]
    ranks: list[RankRow]
    backends: dict[str, dict[str, str]]
    alternatives: dict[str, dict[str, str]]
    assumed: str
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        return asdict(self)


def check(config: PhalanxConfig, num_api_keys: int | None = None) -> CheckReport:
    """Resolve a valid configuration; None = look for API keys where the server would.

    Raises KernelChoiceError when a named backend cannot run, ApiKeyError when the keys cannot be used, ConfigError when
    traces are wanted and their library is missing.
    """
    check_tracing(config.serve.tracing)
    if num_api_keys is None:
        num_api_keys = len(load_digests(config.serve.api_keys_file))
    rank_config = resolve_rank_config(config)
    model = load_model_config(config.model.path)
    dtype = getattr(torch, str(rank_config.model.dtype))
    found, assumed = capabilities(rank_config.device)
    shape = kernel_shape(rank_config, model)
    selection = select.select(config.kernels, found, **shape)
    ranks = _rank_rows(rank_config, model, dtype, selection)
    reasons = selection.reasons()
    return CheckReport(
        config=_resolved_tree(config, rank_config),
        ranks=ranks,
        backends={
            family: {"name": name, "reason": reasons[family]}
            for family, name in selection.names().items()
        },
        alternatives=alternatives(selection, found, shape),
        assumed=assumed,
        warnings=list(_warnings(config, rank_config, model, ranks, num_api_keys)),
    )


def _resolved_tree(config: PhalanxConfig, rank_config: RankConfig) -> dict[str, Any]:
    tree = config.model_dump()
    tree["model"] = rank_config.model.model_dump()
    tree["scheduler"] = rank_config.scheduler.model_dump()
    tree["cache"] = rank_config.cache.model_dump()
    tree["cluster"] |= {"device": rank_config.device, "threads_per_rank": rank_config.threads}
    return tree


def _rank_rows(
    config: RankConfig, model: Qwen3MoeConfig, dtype: torch.dtype, selection: select.Selection
) -> list[RankRow]:
    placement = ExpertPlacement(model.num_experts, config.num_ranks)
    per_node = config.num_ranks // config.num_nodes
    kv_bytes = None
    if config.cache.num_blocks != "auto":
        kv_bytes = config.cache.num_blocks * kv_block_bytes(
            model, config.cache.block_size, config.model.dtype
        )
    scheduler = config.scheduler
    buffer_bytes = _buffer_bytes(
        config, model, dtype, selection, tokens=scheduler.max_num_batched_tokens
    )
    graph_bytes = 0
    if config.device == "cuda" and scheduler.cuda_graphs is not False:
        largest = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        graph_bytes = _buffer_bytes(config, model, dtype, selection, tokens=largest)
    rows = []
    for rank in range(config.num_ranks):
        node, index = divmod(rank, per_node)
        weight_bytes = rank_weight_bytes(
            model, placement, rank, config.model.dtype, fp8_experts=selection.fp8_experts
        )
        row = RankRow(
            rank=rank,
            node=node,
            device=f"cuda:{index}" if config.device == "cuda" else "cpu",
            experts=_expert_range(placement.local_experts(rank)),
            weight_bytes=weight_bytes,
            kv_bytes=_gpu_kv_bytes(config, weight_bytes + buffer_bytes + graph_bytes)
            if kv_bytes is None
            else kv_bytes,
            buffer_bytes=buffer_bytes,
            graph_bytes=graph_bytes,
        )
        rows.append(row)
    return rows


def _expert_range(experts: range) -> str:
    return f"{experts.start}-{experts.stop - 1}" if experts else "none"


def _gpu_kv_bytes(config: RankConfig, other_bytes: int) -> int | None:
    """An upper bound where a GPU can be asked; the rank measures after a profiling forward."""
    if config.device != "cuda" or not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    return max(0, int(total * config.cache.memory_fraction) - other_bytes)


def _buffer_bytes(
    config: RankConfig,
    model: Qwen3MoeConfig,
    dtype: torch.dtype,
    selection: select.Selection,
    *,
    tokens: int,
) -> int:
    """What a rank keeps or briefly needs beside weights and cache in a step of so many tokens.

    Inputs of the step, the logits of a full batch in float32, the hidden states, and what the chosen
    kernels need for exchange and routed rows.
    """
    seqs = config.scheduler.max_num_seqs
    blocks = -(-int(config.model.max_model_len) // config.cache.block_size)
    inputs = INT64 * (3 * tokens + seqs + 2 * seqs * blocks)
    logits = 4 * seqs * model.vocab_size
    hidden_states = tokens * dtype.itemsize * 4 * model.hidden_size
    kernels = select.buffer_bytes(
        selection,
        num_ranks=config.num_ranks,
        dtype=dtype,
        hidden_size=model.hidden_size,
        expert_width=model.moe_intermediate_size,
        top_k=model.num_experts_per_tok,
        max_num_tokens=tokens,
        num_experts=model.num_experts,
    )
    return inputs + logits + hidden_states + kernels


def _warnings(
    config: PhalanxConfig,
    rank_config: RankConfig,
    model: Qwen3MoeConfig,
    ranks: list[RankRow],
    num_api_keys: int,
) -> Iterator[str]:
    per_node = rank_config.num_ranks // rank_config.num_nodes
    if rank_config.device == "cuda":
        found = torch.cuda.device_count()
        if found < per_node:
            yield (
                f"cluster.device is cuda with {per_node} rank(s) a node, this machine has {found} "
                "GPU(s); backends are chosen as if they were there"
            )
    else:
        yield from _cpu_warnings(rank_config, ranks[:per_node])
    yield from not_for_answers(config.model)
    if rank_config.num_ranks > model.num_experts:
        yield (
            f"cluster.ranks is {rank_config.num_ranks} for {model.num_experts} experts: "
            f"{rank_config.num_ranks - model.num_experts} rank(s) hold none"
        )
    if not num_api_keys and not _is_loopback(config.serve.host):
        yield (
            f"serve.host is {config.serve.host}: whoever can reach this machine can use the model; "
            f"set {VARIABLE} or serve.api_keys_file to ask for a key"
        )
    version = foreign_kernels_version()
    if version is not None:
        yield (
            f"the distribution 'kernels' {version} is installed and shares its name with a package "
            "of Phalanx; transformers then fails to import models. Run: pip uninstall kernels"
        )


def _cpu_warnings(config: RankConfig, node_ranks: list[RankRow]) -> Iterator[str]:
    cores = available_cores()
    if config.threads * len(node_ranks) > max(cores, len(node_ranks)):
        yield (
            f"cluster.threads_per_rank {config.threads} times {len(node_ranks)} ranks a node is "
            f"more than the {cores} cores here"
        )
    needed = sum(row.weight_bytes + (row.kv_bytes or 0) + row.buffer_bytes for row in node_ranks)
    available = available_memory()
    if available is not None and needed > available:
        yield (
            f"the ranks of a node need {_size(needed)}, this machine has {_size(available)} "
            "available; lower cache.cpu_memory_gib or cache.num_blocks"
        )


def available_memory() -> int | None:
    """Bytes that processes can still take on this machine, None where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024


def foreign_kernels_version() -> str | None:
    """Version of the installed distribution named `kernels`, which clashes with our package."""
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
    console.print("configuration", style="bold")
    _render_tree(report.config, "  ", console)
    console.print(_rank_table(report.ranks))
    console.print("backends", style="bold")
    for family, choice in report.backends.items():
        console.print(f"  {family:<14}{choice['name']:<20}{choice['reason']}")
        for name, obstacle in report.alternatives[family].items():
            console.print(f"  {'':<14}{name:<20}{obstacle or 'could run'}", style="dim")
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
            console.print(f"{indent}{key:<24}{'null' if value is None else value}")


def _rank_table(ranks: list[RankRow]) -> Table:
    table = Table(title="ranks", title_justify="left", title_style="bold", box=None)
    for name in ("rank", "node", "device", "experts"):
        table.add_column(name)
    for name in ("weights", "KV blocks", "buffers", "graphs"):
        table.add_column(name, justify="right")
    for row in ranks:
        kv = "measured at start" if row.kv_bytes is None else _size(row.kv_bytes)
        table.add_row(
            str(row.rank),
            str(row.node),
            row.device,
            row.experts,
            _size(row.weight_bytes),
            kv,
            _size(row.buffer_bytes),
            _size(row.graph_bytes) if row.graph_bytes else "none",
        )
    return table


def _size(num_bytes: int) -> str:
    if num_bytes >= 1000 * MEGABYTE:
        return f"{num_bytes / MEGABYTE / 1000:,.2f} GB"
    return f"{num_bytes / MEGABYTE:,.1f} MB"
