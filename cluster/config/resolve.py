"""Fills each `auto` of a configuration from the checkpoint and the machine. Needs torch only to count GPUs."""

import os
from collections.abc import Iterable
from functools import cache
from typing import Literal

from cluster.config.errors import ConfigError, Problem
from cluster.config.phalanx_config import (
    CPU_BATCHED_TOKENS,
    CPU_NUM_SEQS,
    GPU_BATCHED_TOKENS,
    GPU_NUM_SEQS,
    PhalanxConfig,
    SchedulerSection,
)
from kernels.interface.kv_layout import group_layers, kv_block_bytes, layout_of
from workers import hub
from workers.config import (
    CacheConfig,
    ModelSection,
    RankConfig,
    SchedulerConfig,
)
from workers.kv_cache.demand import KVDemand, sizes_that_fit
from workers.lora_config import AdapterConfig, LoadedAdapter
from workers.models.draft_config import auto_method, load_draft_config
from workers.models.registry import configured_model
from workers.specs.model import ModelConfig
from workers.specs.pooling import PoolingSpec
from workers.speculation_config import SpeculationConfig

GIB = 2**30
MAX_THREADS_PER_RANK = 8
# Memory of a rank's process without weights and cache, see docs/results/cpu-local.json.
RANK_PROCESS_BYTES = 400 * 10**6


def resolve_rank_config(config: PhalanxConfig, *, num_gpus: int | None = None) -> RankConfig:
    """Fill every `auto` except those of kernels, and num_blocks on GPUs.

    num_gpus: GPUs of all nodes; None = count this machine's.
    Raises ConfigError when the cache cannot hold one request of the longest length, or an adapter is not found.
    """
    from workers.weights.tensors import DTYPE_BYTES  # imports torch

    model_config = configured_model(config.model)
    device = resolve_device(config, num_gpus)
    dtype = model_config.dtype if config.model.dtype == "auto" else config.model.dtype
    length = config.model.max_model_len
    max_model_len = model_config.max_position_embeddings if length == "auto" else length
    resolved = {"dtype": dtype, "max_model_len": max_model_len}
    model = config.model.model_copy(update=resolved | _head(config, model_config.pooling))
    cache, linear_specs = config.cache, model_config.linear_specs
    if cache.state_dtype == "auto" and linear_specs:
        cache = cache.model_copy(update={"state_dtype": linear_specs[0].state_dtype})
    speculation = resolve_speculation(config.speculation, config.model, model_config)
    if cache.num_blocks == "auto" and device == "cpu":
        # Attention is chosen later. Every backend that runs on CPU has this layout.
        groups = group_layers(
            map(layout_of, cache.cached(model_config.attention_specs)), model_config.windows
        )
        draft = load_draft_config(speculation, config.model, model_config)
        groups += () if draft is None else draft.kv_groups(cache)
        limits = resolve_scheduler(config.scheduler, device, max_model_len)
        demand = KVDemand(cache.block_size, model_config.window, limits.max_num_batched_tokens)
        states = cache.cached_states(linear_specs, speculation.most_drafts)
        draft_bytes = sum(spec.draft_bytes(DTYPE_BYTES[dtype]) for spec in states)
        cache = _with_cpu_sizes(
            cache,
            demand,
            max_model_len,
            block_bytes=kv_block_bytes(groups, cache.block_size, DTYPE_BYTES[dtype]),
            slot_bytes=sum(spec.slot_bytes(DTYPE_BYTES[dtype]) for spec in states),
            draft_bytes=draft_bytes,
            num_rows=limits.max_num_seqs,
        )
    return RankConfig(
        model=model,
        scheduler=resolve_scheduler(config.scheduler, device, max_model_len),
        cache=cache,
        kernels=config.kernels,
        overlap=config.overlap,
        speculation=speculation,
        experts=config.experts,
        lora=config.lora,
        adapters=resolve_adapters(config.lora.adapters),
        num_ranks=config.cluster.ranks,
        num_nodes=config.cluster.nodes,
        network=config.cluster.network,
        device=device,
        threads=resolve_threads(config),
        vote_timeout_s=config.cluster.vote_timeout_s,
        fetch_weights=config.cluster.fetch_weights,
        hang_timeout_s=config.cluster.hang_timeout_s,
        log_level=config.serve.log_level,
        log_format=config.serve.log_format,
    )


def _head(config: PhalanxConfig, spec: PoolingSpec | None) -> dict[str, object]:
    """Return the settings of what the model answers with."""
    if spec is None:
        return {"task": "generate"}
    found = {"type": spec.rows, "normalize": spec.normalize}
    return {"task": spec.task, "pooling": config.model.pooling.model_copy(update=found)}


def _with_cpu_sizes(
    cache: CacheConfig,
    demand: KVDemand,
    max_model_len: int,
    *,
    block_bytes: int,
    slot_bytes: int,
    draft_bytes: int,
    num_rows: int,
) -> CacheConfig:
    """Return the cache with KV blocks and snapshots of states of a rank on CPU."""
    needed = demand.blocks(max_model_len)
    states = slot_bytes * cache.num_state_slots(num_rows) + draft_bytes * (1 + num_rows)
    num_blocks, snapshots = sizes_that_fit(
        int(cache.cpu_memory_gib * GIB) - states,
        cache,
        demand,
        max_model_len,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        num_rows=num_rows,
    )
    if num_blocks < needed:
        beside, fewer = "", ""
        if states:
            beside = f" beside {states / GIB:.3g} GiB of states"
            fewer = ", or less of cache.state_snapshots or scheduler.max_num_seqs"
        problem = Problem(
            "cache.cpu_memory_gib",
            f"{cache.cpu_memory_gib:g} GiB cannot hold one request of model.max_model_len = "
            f"{max_model_len}{beside}; expected at least "
            f"{(needed * block_bytes + states) / GIB:.3g}, or a smaller length{fewer}",
        )
        raise ConfigError.of("configuration", [problem])
    return cache.model_copy(update={"num_blocks": num_blocks, "state_snapshots": snapshots})


def resolve_scheduler(
    scheduler: SchedulerSection, device: Literal["cpu", "cuda"], max_model_len: int
) -> SchedulerConfig:
    """The limits of a step without `auto`; an auto limit is chosen to fit the other limit."""
    on_gpu = device == "cuda"
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if tokens == "auto":
        least = max(
            1 if seqs == "auto" else seqs, 1 if scheduler.chunked_prefill else max_model_len
        )
        tokens = max(GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS, least)
    if seqs == "auto":
        seqs = min(GPU_NUM_SEQS if on_gpu else CPU_NUM_SEQS, tokens)
    given = scheduler.model_dump() | {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    return SchedulerConfig(**given)


def resolve_speculation(
    speculation: SpeculationConfig, section: ModelSection, model: ModelConfig
) -> SpeculationConfig:
    """The drafter without `auto`, and without a draft model of its own."""
    if speculation.method != "auto":
        return speculation
    return speculation.model_copy(update={"method": auto_method(model, section)})


def resolve_adapters(adapters: Iterable[AdapterConfig]) -> tuple[LoadedAdapter, ...]:
    """The adapters of the start, with ids from 1 on. Raises ConfigError with each that the Hub does not give."""
    loaded, problems = [], []
    for number, it in enumerate(adapters, start=1):
        try:
            revision = adapter_revision(it.path)
        except hub.HubError as error:
            problems.append(Problem("lora.adapters", f"{it.name}: {error.reason}"))
        else:
            loaded.append(LoadedAdapter(id=number, name=it.name, path=it.path, revision=revision))
    if problems:
        raise ConfigError.of("configuration", problems)
    return tuple(loaded)


@cache
def adapter_revision(path: str) -> str | None:
    """The commit of an adapter on the Hub, which is fetched; None for a folder."""
    return None if os.path.isabs(path) else hub.find_adapter(path)


def max_num_seqs(config: PhalanxConfig, num_gpus: int) -> int:
    """Sequences running at once on a rank if all nodes together have `num_gpus`. Needs no torch."""
    device = resolve_device(config, num_gpus)
    length = configured_model(config.model).max_position_embeddings
    return resolve_scheduler(config.scheduler, device, length).max_num_seqs


def resolve_device(config: PhalanxConfig, num_gpus: int | None = None) -> Literal["cpu", "cuda"]:
    """cluster.device; auto is cuda if there is a GPU for every rank."""
    if config.cluster.device != "auto":
        return config.cluster.device
    if num_gpus is None:
        import torch

        num_gpus = torch.cuda.device_count() * config.cluster.nodes
    return "cuda" if num_gpus >= config.cluster.ranks else "cpu"


def resolve_threads(config: PhalanxConfig) -> int:
    """cluster.threads_per_rank; auto is a share of this machine's cores but one, which is for HTTP.

    A rank with threads that wait for a busy core is slower than a rank with fewer threads.
    """
    if config.cluster.threads_per_rank != "auto":
        return config.cluster.threads_per_rank
    per_node = config.cluster.ranks_per_node
    return min(MAX_THREADS_PER_RANK, max(1, (available_cores() - 1) // per_node))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_num_ranks(config: PhalanxConfig) -> None:
    """Raise ConfigError if the ranks' processes take more memory than this machine has, before they load a model."""
    if config.cluster.ray_address is not None:
        return
    per_node = config.cluster.ranks_per_node
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if per_node * RANK_PROCESS_BYTES > memory:
        message = (
            f"{per_node} ranks on a node take {per_node * RANK_PROCESS_BYTES / 1e9:.0f} GB before they load a model, "
            f"this machine has {memory / 1e9:.0f}; expected at most {memory // RANK_PROCESS_BYTES}"
        )
        raise ConfigError.of("configuration", [Problem("cluster.ranks", message)])
