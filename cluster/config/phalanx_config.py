"""The whole configuration: one YAML, composed of the sections of the layers that read them.

Reading it needs neither torch nor Ray. Settings that this machine or the checkpoint decides
(`auto`) are filled in by `resolve_rank_config`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from cluster.config.errors import ConfigError, Problem, from_pydantic
from cluster.config.files import ConfigSource, read_config
from cluster.config.serve_section import ServeConfig
from kernels.backends.config import KernelsConfig
from workers.config import (
    Auto,
    CacheConfig,
    ModelConfig,
    OverlapConfig,
    PositiveInt,
    RankConfig,
    SchedulerConfig,
    Section,
)
from workers.models.qwen3_moe.config import Qwen3MoeConfig, load_model_config
from workers.parallel import ParallelDims

GIB = 2**30
MAX_RANKS = 1024
MAX_THREADS_PER_RANK = 8
# Of a rank's process beside weights and cache, see docs/results/cpu-local.json.
RANK_PROCESS_BYTES = 400 * 10**6
# On a GPU a step of few tokens takes as long as one of some hundreds: it is bound by reading the weights.
GPU_NUM_SEQS, GPU_BATCHED_TOKENS = 256, 8192
CPU_NUM_SEQS, CPU_BATCHED_TOKENS = 64, 2048
__all__ = ["ClusterConfig", "ConfigError", "PhalanxConfig", "ServeConfig", "load_config"]


class ClusterConfig(Section):
    """How many ranks, and where they run."""

    ranks: int = Field(
        1, ge=1, le=MAX_RANKS, description="Data-parallel ranks; the experts are spread over them."
    )
    nodes: int = Field(
        1, ge=1, le=MAX_RANKS, description="Machines; the ranks divide evenly over them."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Where ranks compute; auto = cuda when each rank can have a GPU, else cpu.",
    )
    threads_per_rank: Auto | PositiveInt = Field(
        "auto",
        description="CPU threads of a rank; auto = its share of all cores but one, at most 8.",
    )
    vote_timeout_s: float = Field(
        30.0, gt=0, description="Seconds a rank waits for the others in a step before it gives up."
    )
    start_timeout_s: float = Field(
        300.0, gt=0, description="Seconds that each stage of the start may take."
    )
    ray_address: str | None = Field(
        None, description="null = start a local Ray; auto or host:port = join a running one."
    )

    @property
    def dims(self) -> ParallelDims:
        """The layout of the ranks; valid when the checks of the configuration have passed."""
        return ParallelDims(num_ranks=self.ranks, num_nodes=self.nodes)


class SchedulerSection(SchedulerConfig):
    """Limits of one step on one rank; auto = by the device."""

    max_num_seqs: Auto | PositiveInt = Field(  # type: ignore[assignment]
        "auto",
        description=f"Sequences running at once on a rank; auto = {GPU_NUM_SEQS} on cuda, {CPU_NUM_SEQS} on cpu.",
    )
    max_num_batched_tokens: Auto | PositiveInt = Field(  # type: ignore[assignment]
        "auto",
        description=f"Tokens of one step on a rank; auto = {GPU_BATCHED_TOKENS} on cuda, {CPU_BATCHED_TOKENS} on cpu.",
    )


class PhalanxConfig(Section):
    """A Phalanx server: model, ranks, kernels, HTTP."""

    model: ModelConfig
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)


def json_schema() -> dict[str, Any]:
    """JSON schema of the YAML, for editors; committed as configs/schema.json."""
    schema = PhalanxConfig.model_json_schema()
    for node in (schema, *schema["$defs"].values()):
        for field in node["properties"].values():
            field.pop("title", None)  # the key in other letters
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PhalanxConfig:
    """Read a YAML and lay `key.path=value` overrides (values in YAML) over it.

    Relative paths count from the YAML's folder, or from the current folder when an override sets
    them; they come out absolute, and serve.model_name filled. Raises ConfigError with all problems at
    once.
    """
    from cluster.config.checks import check_together

    path = Path(path)
    source = read_config(path, overrides)
    problems = list(source.problems)
    unreadable = any(not problem.key for problem in problems) and not source.data
    if not unreadable:
        _fill_derived(source, path)
        config, field_problems = _validate(source.data)
        problems += field_problems
        wrong = {problem.key for problem in problems}
        problems += [p for p in check_together(config) if not _touches(p, wrong)]
        if not problems:
            return config
    raise ConfigError.of(str(path), problems, source.places)


def _touches(problem: Problem, wrong: set[str]) -> bool:
    """Whether it rests on a key, or a key of a section, that is wrong itself."""
    keys = {problem.key, *problem.involves}
    return bool(wrong & (keys | {key.partition(".")[0] for key in keys}))


def _fill_derived(source: ConfigSource, path: Path) -> None:
    model_path = _make_absolute(source, path, "model", "path")
    serve = source.data.setdefault("serve", {})
    if model_path and isinstance(serve, dict) and serve.get("model_name") is None:
        serve["model_name"] = Path(model_path).name
    _make_absolute(source, path, "serve", "api_keys_file")


def _make_absolute(source: ConfigSource, path: Path, section: str, key: str) -> str | None:
    """Count a path from the YAML's folder, or from the current one when an override sets it."""
    values = source.data.get(section)
    if not isinstance(values, dict) or not isinstance(values.get(key), str) or not values[key]:
        return None
    by_override = source.places.get(f"{section}.{key}") == "--set"
    base = Path.cwd() if by_override else path.absolute().parent
    values[key] = os.path.normpath(base / Path(values[key]).expanduser())
    return values[key]


def _validate(data: dict[str, Any]) -> tuple[PhalanxConfig, list[Problem]]:
    """The configuration and what is wrong with single fields, which get their defaults in it."""
    try:
        return PhalanxConfig.model_validate(data, strict=True), []
    except ValidationError as error:
        problems = from_pydantic(error, PhalanxConfig)
    for problem in problems:
        data = _without(data, problem.key.split("."))
    model = {"path": "", **data.get("model", {})}
    return PhalanxConfig.model_validate({**data, "model": model}, strict=True), problems


def _without(data: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    head, *rest = parts
    kept = {key: value for key, value in data.items() if key != head}
    if rest and isinstance(data.get(head), dict):
        kept[head] = _without(data[head], rest)
    return kept


def resolve_rank_config(config: PhalanxConfig, *, num_gpus: int | None = None) -> RankConfig:
    """Fill every `auto` from checkpoint and machine; those of kernels stay, and num_blocks on GPUs.

    num_gpus is what all nodes have together; None = look at this machine.
    Raises ConfigError when the cache cannot hold one request of the longest length.
    """
    model_config = load_model_config(config.model.path)
    device = resolve_device(config, num_gpus)
    model = config.model.model_copy(
        update={
            "dtype": model_config.dtype if config.model.dtype == "auto" else config.model.dtype,
            "max_model_len": model_config.max_position_embeddings
            if config.model.max_model_len == "auto"
            else config.model.max_model_len,
        }
    )
    cache = config.cache
    if cache.num_blocks == "auto" and device == "cpu":
        num_blocks = _cpu_blocks(config, model_config, model)
        cache = cache.model_copy(update={"num_blocks": num_blocks})
    return RankConfig(
        model=model,
        scheduler=resolve_scheduler(config.scheduler, device, int(model.max_model_len)),
        cache=cache,
        kernels=config.kernels,
        overlap=config.overlap,
        num_ranks=config.cluster.ranks,
        num_nodes=config.cluster.nodes,
        device=device,
        threads=resolve_threads(config),
        vote_timeout_s=config.cluster.vote_timeout_s,
        log_level=config.serve.log_level,
        log_format=config.serve.log_format,
    )


def _cpu_blocks(config: PhalanxConfig, model_config: Qwen3MoeConfig, model: ModelConfig) -> int:

    from workers.weights.tensors import kv_block_bytes

    cache = config.cache
    block_bytes = kv_block_bytes(model_config, cache.block_size, model.dtype)
    num_blocks = int(cache.cpu_memory_gib * GIB) // block_bytes
    needed = -(-int(model.max_model_len) // cache.block_size)
    if num_blocks < needed:
        problem = Problem(
            "cache.cpu_memory_gib",
            f"{cache.cpu_memory_gib:g} GiB cannot hold one request of model.max_model_len = "
            f"{model.max_model_len}; expected at least {needed * block_bytes / GIB:.3g}, "
            "or a smaller length",
        )
        raise ConfigError.of("configuration", [problem])
    return num_blocks


def resolve_scheduler(
    scheduler: SchedulerSection, device: Literal["cpu", "cuda"], max_model_len: int
) -> SchedulerConfig:
    """The limits of a step without `auto`; one that is left out makes room for one that is given."""
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


def max_num_seqs(config: PhalanxConfig, num_gpus: int) -> int:
    """Sequences running at once on a rank, where all nodes have `num_gpus` together; needs no torch."""
    device = resolve_device(config, num_gpus)
    length = load_model_config(config.model.path).max_position_embeddings
    return resolve_scheduler(config.scheduler, device, length).max_num_seqs


def resolve_device(config: PhalanxConfig, num_gpus: int | None = None) -> Literal["cpu", "cuda"]:
    """cluster.device; auto is cuda when there is a GPU for every rank."""
    if config.cluster.device != "auto":
        return config.cluster.device
    if num_gpus is None:
        import torch

        num_gpus = torch.cuda.device_count() * config.cluster.nodes
    return "cuda" if num_gpus >= config.cluster.ranks else "cpu"


def resolve_threads(config: PhalanxConfig) -> int:
    """cluster.threads_per_rank; auto is a share of this machine's cores, less one for HTTP.

    A rank whose threads wait for a core that another process holds is slower than one with fewer threads.
    """
    if config.cluster.threads_per_rank != "auto":
        return config.cluster.threads_per_rank
    per_node = config.cluster.dims.ranks_per_node
    return min(MAX_THREADS_PER_RANK, max(1, (available_cores() - 1) // per_node))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_num_ranks(config: PhalanxConfig) -> None:
    """Raises ConfigError when the ranks' processes, whatever the model, take more memory than this machine has."""
    if config.cluster.ray_address is not None:
        return
    per_node = config.cluster.dims.ranks_per_node
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if per_node * RANK_PROCESS_BYTES > memory:
        message = (
            f"{per_node} ranks on a node take {per_node * RANK_PROCESS_BYTES / 1e9:.0f} GB before they load a model, "
            f"this machine has {memory / 1e9:.0f}; expected at most {memory // RANK_PROCESS_BYTES}"
        )
        raise ConfigError.of("configuration", [Problem("cluster.ranks", message)])
