"""The whole configuration: one YAML, composed of the sections of the layers that read them.

Needs neither torch nor Ray. `cluster.config.load` reads it; `cluster.config.resolve` fills the settings that the
machine or the checkpoint decides (`auto`).
"""

from typing import Any, Literal

from pydantic import Field

from cluster.config.serve_section import ServeConfig
from kernels.interface.config import KernelsConfig
from kernels.interface.experts_config import ExpertsConfig
from workers.config import (
    CacheConfig,
    ModelSection,
    OverlapConfig,
    SchedulerConfig,
)
from workers.lora_config import LoraConfig
from workers.section import Auto, PositiveInt, Section
from workers.speculation_config import SpeculationConfig

MAX_RANKS = 1024
# On a GPU a step of few tokens takes as long as one of some hundreds: it is bound by reading the weights.
GPU_NUM_SEQS, GPU_BATCHED_TOKENS = 256, 8192
CPU_NUM_SEQS, CPU_BATCHED_TOKENS = 64, 2048


class ClusterConfig(Section):
    """Number and place of the ranks."""

    ranks: int = Field(
        1, ge=1, le=MAX_RANKS, description="Data-parallel ranks; the experts are spread over them."
    )
    nodes: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Machines; without a pool, the ranks divide evenly over them.",
    )
    network: str | None = Field(
        None,
        description="Network (10.1.0.0/16, fd00::/8) or interface (eth1) by which the ranks of all machines reach each "
        "other; null = that of Ray's node addresses.",
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
        120.0,
        gt=0,
        description="Seconds of one step that a rank waits for a peer which computes; for a peer without a sign of "
        "life hang_timeout_s counts.",
    )
    start_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Seconds that each stage of the start may take. A stage that fetches a checkpoint may take any "
        "time, but not so long without progress.",
    )
    hang_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Seconds without a sign of life (neither a vote nor, on a CPU, processor time) after which a rank "
        "hangs, four times as many in a stage of a rebuild; also the time of a rank to leave a failed epoch. The "
        "process of a rank that hangs is replaced. Also seconds after which a host that does not answer is lost.",
    )
    rebuild_attempts: int = Field(
        5,
        ge=0,
        description="Rebuilds in a row that may fail, or serve for less than 5 s, before the group fails; 0 = a "
        "failed rank ends the group.",
    )
    standby_ranks: int = Field(
        0,
        ge=0,
        le=MAX_RANKS,
        description="Processes of each group that wait to replace a dead rank: they have loaded everything but "
        "experts. Each takes a place beside the ranks: on cuda a GPU.",
    )
    shrink: bool = Field(
        False,
        description="Go on with fewer ranks where a dead rank has no place, or no new process of it starts; grow back "
        "when there is room. The ranks that are left hold all experts and need the memory for them.",
    )
    slow_rank_factor: float | None = Field(
        3.0,
        gt=1,
        description="A rank is named as slow, in the log and in the metrics, when its own time of a step, without "
        "waits, is this multiple of that of the other ranks with equal work; null = no rank is slow.",
    )
    replace_slow_rank: bool = Field(
        False,
        description="Replace the process of a rank that stays slow, at most once in ten minutes; it counts for "
        "rebuild_attempts.",
    )
    ray_address: str | None = Field(
        None, description="null = start a local Ray; auto or host:port = join a running one."
    )
    fetch_weights: bool = Field(
        False,
        description="Copy the checkpoint from a node that has it to nodes of ranks that lack files of it.",
    )

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node; their mean, rounded up, where the groups of a pool differ."""
        return -(-self.ranks // self.nodes)


Role = Literal["generate", "prefill", "decode"]
"""The part of a request that a group computes: all of it, its prompt and first token, or what follows the prompt."""


class PoolGroup(Section):
    """One group of the model pool: ranks in lockstep, which fail and rebuild apart from other groups."""

    role: Role = Field(
        "generate",
        description="generate = whole requests; prefill = prompts and first tokens, for groups of the role decode, and "
        "whole requests while none of these serves; decode = what follows, with the prompt's KV from a prefill group, "
        "or computed here when there is none.",
    )
    ranks: int = Field(ge=1, le=MAX_RANKS, description="Of the group; it has all experts.")
    nodes: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Machines of the group; its ranks divide evenly over them.",
    )


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

    model: ModelSection
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    pool: list[PoolGroup] = Field(
        default_factory=list,
        description="Groups of ranks, which together have cluster.ranks; none = one group of all ranks.",
    )
    serve: ServeConfig = Field(default_factory=ServeConfig)


def json_schema() -> dict[str, Any]:
    """JSON schema of the YAML, for editors; committed as configs/schema.json."""
    schema = PhalanxConfig.model_json_schema()
    for node in (schema, *schema["$defs"].values()):
        for field in node["properties"].values():
            field.pop("title", None)  # it repeats the key
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
