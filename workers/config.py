"""Sections of the YAML that a rank reads: model, scheduler, cache. Knows nothing of Ray or HTTP."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.config import KernelsConfig
from kernels.interface.experts_config import ExpertsConfig
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from workers import hub
from workers.log import LogFormat, LogLevel
from workers.lora_config import LoadedAdapter, LoraConfig
from workers.parallel import ParallelDims
from workers.section import Auto, PositiveInt, Section
from workers.speculation_config import SpeculationConfig


class RoutingConfig(Section):
    """Choice of each token's experts."""

    kind: Literal["model", "uniform", "zipf", "balanced"] = Field(
        "model",
        description="model = its router. For experiments, by a law: uniform = all experts alike; zipf = the r-th most "
        "popular expert r^-s as likely; balanced = all in turn.",
    )
    s: float = Field(1.0, ge=0, le=10, description="Exponent of zipf; 0 is uniform.")


class PoolingConfig(Section):
    """Vectors and scores in the place of tokens: how they are made of the last hidden states of a prompt."""

    type: Literal["auto", "last", "mean", "cls"] = Field(
        "auto",
        description="Tokens of a prompt that count: the last one, all (mean), or the first one (cls); auto = as "
        "1_Pooling/config.json of sentence-transformers has it, last without such a file. With mean and cls a prompt "
        "takes nothing from the prefix cache.",
    )
    normalize: Auto | bool = Field(
        "auto",
        description="Divide embeddings by their length; auto = as modules.json of sentence-transformers has it, true "
        "without such a file.",
    )
    dimensions: Literal["auto", "any"] | Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        "auto",
        description="Values of a Matryoshka embedding that a request may ask for by `dimensions`; any = every number; "
        "auto = is_matryoshka and matryoshka_dimensions of config.json.",
    )
    score_tokens: Auto | Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        "auto",
        description="Tokens for no and yes, between which a model without a classification head decides for "
        "model.task = score; auto = classifier_from_token of config.json, otherwise [no, yes].",
    )
    score_template: Literal["auto", "pair", "chat", "qwen3_reranker"] = Field(
        "auto",
        description="Prompt of a query and a document: pair = the tokenizer's pair of texts; chat = the chat template, "
        "with messages of the roles query and document; qwen3_reranker = that of Qwen3-Reranker. auto = chat if the "
        "template has these roles; otherwise pair with a classification head, qwen3_reranker without.",
    )


Task = Literal["generate", "embed", "classify", "score"]


class ModelSection(Section):
    """Checkpoint and precision."""

    path: str = Field(
        description="Hugging Face checkpoint: a folder, relative to the YAML's folder, or a name on the Hub such as "
        "Qwen/Qwen3-30B-A3B. An existing folder is never taken for a name."
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit of a model on the Hub; null = its main branch.",
    )
    weights: Literal["checkpoint", "dummy"] = Field(
        "checkpoint",
        description="dummy = random ones, for measurements: the folder needs only config.json and the tokenizer.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Precision of weights and KV cache; auto = the checkpoint's own."
    )
    max_model_len: Auto | PositiveInt = Field(
        "auto", description="Longest prompt plus output, in tokens; auto = the checkpoint's own."
    )
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    task: Auto | Task = Field(
        "auto",
        description="What the server answers with: generate = text; embed = embeddings; classify = the classes of a "
        "classification head; score = one score of a text or of a pair. auto = embed for checkpoints of "
        "sentence-transformers and of base models, classify or score for *ForSequenceClassification, else generate.",
    )
    pooling: PoolingConfig = Field(default_factory=PoolingConfig)
    language_model_only: bool = Field(
        False,
        description="Leave the vision tower of the checkpoint out: no memory for it, and no images in requests.",
    )

    @property
    def folder(self) -> Path:
        """The checkpoint's folder on this machine. A loaded configuration has a revision for Hub names only."""
        return (
            Path(self.path)
            if self.revision is None
            else hub.snapshot_folder(self.path, self.revision)
        )


def not_for_answers(model: ModelSection) -> Iterator[str]:
    """Yield a warning for each setting that makes the model's answers meaningless."""
    if model.weights == "dummy":
        yield "model.weights is dummy: the weights are random, so the answers mean nothing"
    if model.routing.kind != "model":
        law = f"zipf with s = {model.routing.s:g}" if model.routing.kind == "zipf" else "it alone"
        yield (
            f"model.routing.kind is {model.routing.kind}: {law} chooses the experts, not the model's "
            "router, so the answers mean nothing"
        )


class SchedulerConfig(Section):
    """Limits of one step on one rank."""

    max_num_seqs: int = Field(64, ge=1, description="Sequences running at once on a rank.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens of one step on a rank.")
    chunked_prefill: bool = Field(True, description="Split long prompts over several steps.")
    max_prefill_tokens_with_decodes: Auto | PositiveInt = Field(
        "auto",
        description="Most prompt tokens of a rank in a step in which any rank decodes, because prompts delay the "
        "tokens of all ranks; auto = no limit without target_itl_ms, otherwise adapted in service, so that p99 of the "
        "gap between tokens stays under target_itl_ms.",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0,
        description="Milliseconds between two tokens of a request, for which max_prefill_tokens_with_decodes = auto "
        "limits prompts. Prompts get at least half of the time, and at least 128 tokens a step.",
    )
    async_scheduling: Auto | bool = Field(
        "auto",
        description="Launch each step before the tokens of the one before are read; auto = on cuda.",
    )
    max_image_tokens: Auto | PositiveInt = Field(
        "auto",
        description="Most tokens of an image; its vision tower runs once with so many at the start, to measure memory. "
        "auto = those of the largest image that the checkpoint's processor makes, at most model.max_model_len.",
    )
    image_tokens_per_step: Auto | PositiveInt = Field(
        "auto",
        description="Tokens of images that the vision tower computes beside a step in which a rank decodes, and as "
        "many again as a rank has prompt tokens in it: they delay the tokens of all ranks. auto = on cuda by measured "
        "times, so that a step that only decodes takes at most about 1.3 times as long; on cpu 256. While no rank "
        "decodes, there is no limit.",
    )
    cuda_graphs: Auto | bool = Field(
        "auto", description="Replay decode steps from CUDA graphs; auto = where the kernels can."
    )
    cuda_graph_sizes: Auto | Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        "auto",
        description="Tokens of the steps captured as CUDA graphs, such as [1, 2, 4, 8]. A step replays the next larger "
        "size; a step larger than all sizes runs without a graph. Decodes are captured up to max_num_seqs. auto = four "
        "sizes an octave, up to the largest step.",
    )


FEW_SNAPSHOTS = 16  # of states, where no free memory was measured


class CacheConfig(Section):
    """The paged KV cache of one rank."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens in one KV block.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        "auto",
        description="Precision of cached K and V; auto = model.dtype; fp8 = e4m3 with a scale for each token and head: "
        "half the memory of 16-bit values, with rounding errors. Latents (MLA) have a scale for each token, and the "
        "rotated key stays in bfloat16. On GPUs it is experimental: its kernels have not passed all their tests on a "
        "GPU yet.",
    )
    state_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the states of linear attention between steps; auto = mamba_ssm_dtype of the "
        "checkpoint, float32 where it has none; bfloat16 = half the memory, and decodes read and write half the bytes. "
        "Arithmetic is float32.",
    )
    prefix_caching: bool = Field(
        True, description="Keep full blocks and share them with later requests of equal prefix."
    )
    num_blocks: Auto | PositiveInt = Field(
        "auto", description="KV blocks a rank; auto = from memory_fraction or cpu_memory_gib."
    )
    memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of GPU memory that weights, steps, tensors of graphs and KV may take (auto, cuda).",
    )
    cpu_memory_gib: float = Field(
        1.0, gt=0, description="KV memory a rank on CPU (auto, cpu), in GiB."
    )
    host_memory_gib: float = Field(
        0,
        ge=0,
        description="Host memory of each node, in GiB, that keeps KV blocks and states when they leave the device, for "
        "all its ranks; 0 = none.",
    )
    disk_path: str | None = Field(
        None,
        min_length=1,
        description="Folder of each node for KV that leaves host_memory_gib, in files that outlive the server; "
        "relative to the YAML's folder; null = none. It holds contents of prompts and answers.",
    )
    disk_gib: float = Field(16.0, gt=0, description="Most GiB of the files in disk_path.")
    transfer: Literal["off", "nixl"] = Field(
        "off",
        description="How a decode group gets the KV of a prompt from a prefill group on another node: nixl = NIXL "
        "(the extra phalanx[nixl]) reads it from that node's host memory into its own; off = it computes the prompt.",
    )
    state_snapshots: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="Prefixes a rank keeps the states of linear attention of; 0 = no prefix caching there; auto = as "
        "memory allows for requests of expected_tokens, 16 where num_blocks is set.",
    )
    image_tokens: Auto | PositiveInt = Field(
        "auto",
        description="Tokens of images of which a rank keeps the embeddings, for prompts that wait or are computed, and "
        "for the same image again. auto = 32,768, at most model.max_model_len, at least max_image_tokens.",
    )
    expected_tokens: int = Field(
        4096,
        ge=1,
        description="Tokens of a usual request, its answer included: where a model has linear attention, memory is "
        "split by it between state_snapshots and KV blocks.",
    )

    @field_validator("transfer", mode="before")
    @classmethod
    def _yaml_words(cls, value: object) -> object:
        """Turn a boolean back into a word, because YAML 1.1 reads a bare `off` as a boolean."""
        return "off" if value is False else value

    def cached(self, specs: Iterable[AttentionSpec]) -> tuple[AttentionSpec, ...]:
        """Return the specs of a model's layers with this cache's precision."""
        return tuple(replace(spec, fp8_cache=self.dtype == "fp8") for spec in specs)

    def cached_states(
        self, specs: Iterable[LinearAttentionSpec], num_drafts: int = 0
    ) -> tuple[LinearAttentionSpec, ...]:
        """Return the specs of a model's layers of linear attention with this cache's precision of states.

        num_drafts   most drafts of a sequence in a step
        """
        specs = (replace(spec, num_drafts=num_drafts) for spec in specs)
        if self.state_dtype == "auto":
            return tuple(specs)
        return tuple(replace(spec, state_dtype=self.state_dtype) for spec in specs)

    @property
    def num_snapshots(self) -> int | None:
        """States of prefixes; None: the rank measures how many fit."""
        if not self.prefix_caching:
            return 0
        if self.state_snapshots == "auto":
            return FEW_SNAPSHOTS if self.num_blocks != "auto" else None
        return self.state_snapshots

    def num_state_slots(self, max_num_seqs: int) -> int:
        """Slots of a rank for states of linear attention: of padding, running sequences and prefixes."""
        return 1 + max_num_seqs + (self.num_snapshots or 0)


class OverlapConfig(Section):
    """Ubatches: one ubatch of a step communicates while another one computes."""

    mode: Literal["auto", "on", "off"] = Field(
        "auto",
        description="auto = at sizes where it was faster when measured at the start; on = wherever a step can be cut.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _yaml_words(cls, value: object) -> object:
        """Turn booleans back into words, because YAML 1.1 reads a bare `on` or `off` as a boolean."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    num_ubatches: int = Field(2, ge=2, le=8, description="Ubatches of a step.")
    min_decode_tokens: Auto | PositiveInt = Field(
        "auto", description="Fewest sequences of a rank, all decoding, that are worth cutting."
    )
    min_prefill_tokens: Auto | PositiveInt = Field(
        "auto", description="Fewest tokens of a rank's step with prompts that are worth cutting."
    )
    comm_sms: Auto | PositiveInt = Field(
        "auto",
        description="Multiprocessors of the all-to-all while ubatches overlap, if its backend takes a limit.",
    )


_OF_EPOCH = (
    *("num_ranks", "num_nodes", "threads", "vote_timeout_s", "log_level", "log_format"),
    "adapters",
)
_OF_EPOCH_IN_SECTIONS = (("kernels", "all2all"), ("model", "routing"))


class RankConfig(Section):
    """Resolved settings of one rank: `auto` remains in kernels only; model.path is absolute or has a commit."""

    model: ModelSection
    scheduler: SchedulerConfig
    cache: CacheConfig
    kernels: KernelsConfig
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    adapters: tuple[LoadedAdapter, ...] = ()
    num_ranks: int = Field(ge=1)
    num_nodes: int = Field(1, ge=1)
    network: str | None = Field(
        None, description="Network or interface between hosts; null = that of Ray's node addresses."
    )
    device: Literal["cpu", "cuda"]
    threads: int = Field(ge=1, description="CPU threads of a rank's torch operators.")
    vote_timeout_s: float = Field(gt=0, description="How long a rank waits for the others.")
    fetch_weights: bool = Field(False, description="Copy the checkpoint from node to node.")
    hang_timeout_s: float = Field(
        5.0, gt=0, description="How long a rank waits for a host that does not answer."
    )
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    @property
    def max_logits_rows(self) -> int:
        """Rows with logits of the largest step: of each sequence one, and one for each draft."""
        rows = self.scheduler.max_num_seqs * self.speculation.rows_per_seq
        return min(rows, self.scheduler.max_num_batched_tokens)

    @property
    def dims(self) -> ParallelDims:
        """The layout of the ranks."""
        return ParallelDims(num_ranks=self.num_ranks, num_nodes=self.num_nodes)

    def differs_for_process(self, other: "RankConfig") -> list[str]:
        """Return the settings that differ from `other` and that a process cannot change between two epochs."""
        pairs = zip(self._of_process(), other._of_process(), strict=True)
        return sorted(key for (key, mine), (_, value) in pairs if mine != value)

    def _of_process(self) -> Iterator[tuple[str, object]]:
        for name, value in self.model_dump(exclude={*_OF_EPOCH, "overlap"}).items():
            if isinstance(value, dict):
                for key, part in value.items():
                    if (name, key) not in _OF_EPOCH_IN_SECTIONS:
                        yield f"{name}.{key}", part
            else:
                yield name, value
