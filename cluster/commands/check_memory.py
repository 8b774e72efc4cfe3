"""Estimates the memory of each rank of a configuration. Reads nothing of the machine but the size of its GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cluster.commands.check_host_memory import SessionBytes, buffer_bytes
from kernels.backends.memory import backend_memory
from kernels.backends.select import Selection
from kernels.interface.backend import BackendShape
from kernels.routing.expert_map import ExpertMap
from workers.adapters.layout import slots_bytes
from workers.config import RankConfig
from workers.images.limits import ImageLimits
from workers.models.draft_config import load_draft_config
from workers.rank.device_memory import size
from workers.runner.graph_sizes import GraphSizes
from workers.specs.expert_layout import moe_layers
from workers.specs.model import ModelConfig
from workers.weights.tensors import draft_head_bytes, rank_weight_bytes

INT64 = 8


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank: its place, its experts, its memory.

    weight_bytes   with those of a draft model, which are draft_bytes
    kv_bytes       KV cache; None if the rank measures the size when it starts
    state_bytes    states of linear attention, of running sequences and of prefixes, and inputs of drafts beside them
    adapter_bytes  slots of LoRA adapters
    buffer_bytes   backends, the largest step, and the largest image with the embeddings that are kept
    ubatch_bytes   further all-to-alls and attentions of ubatches, 0 without ubatches
    graph_bytes    memory pool of the CUDA graphs, 0 without graphs; CUDA's own memory for each graph is not counted
    """

    rank: int
    node: int
    device: str
    experts: str
    weight_bytes: int
    kv_bytes: int | None
    buffer_bytes: int
    ubatch_bytes: int
    graph_bytes: int
    state_bytes: int = 0
    adapter_bytes: int = 0
    draft_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """All memory but the KV cache."""
        return (
            self.state_bytes
            + self.adapter_bytes
            + self.weight_bytes
            + self.buffer_bytes
            + self.ubatch_bytes
            + self.graph_bytes
        )


def rank_rows(
    config: RankConfig,
    model: ModelConfig,
    selection: Selection,
    shape: BackendShape,
    *,
    num_ubatches: int,
    graphs: GraphSizes,
) -> list[RankRow]:
    """Return a row for each rank; `shape` is from `backend_shape`, num_ubatches is 0 if no step is ever cut."""
    dims = config.dims
    expert_map = dims.expert_map(model.num_experts, config.experts.redundant_slots)
    held = backend_memory(selection, shape, num_ubatches=num_ubatches)
    step = held.step + _model_bytes(config, model, shape.dtype, shape.max_num_tokens)
    step += image_bytes(config, model, shape.dtype.itemsize)
    graph_bytes = 0
    if graphs:
        of_graph = backend_memory(selection, replace(shape, max_num_tokens=graphs.largest))
        graph_bytes = of_graph.step + _model_bytes(config, model, shape.dtype, graphs.largest)
    dtype = config.model.dtype
    assert dtype != "auto", "a RankConfig has the checkpoint's dtype in its place"
    draft = load_draft_config(config.speculation, config.model, model)
    state_bytes = _state_bytes(config, selection, shape)
    session = SessionBytes.of(config, model, selection, shape)
    copies = buffer_bytes(config, session.block, session.state)
    weight_bytes = partial(
        rank_weight_bytes,
        expert_map=expert_map,
        dtype=dtype,
        fp8_experts=selection.fp8_experts,
        fp8_dense=selection.fp8_dense,
        in_four_bits=selection.four_bit_experts,
    )

    with_mtp = draft is not None and draft.eagle is None
    head_bytes = draft_head_bytes(model, fp8_dense=selection.fp8_dense) if with_mtp else 0
    table = []
    for rank in dims.ranks():
        draft_bytes = 0 if draft is None else head_bytes + weight_bytes(draft.layers, rank=rank)
        row = RankRow(
            rank=rank,
            node=dims.node(rank),
            device=f"cuda:{dims.local_rank(rank)}" if config.device == "cuda" else "cpu",
            experts=_expert_range(expert_map.experts_of(rank), config.experts.redundant_slots),
            adapter_bytes=slots_bytes(model, config, rank),
            weight_bytes=weight_bytes(model, rank=rank) + draft_bytes,
            draft_bytes=draft_bytes,
            kv_bytes=None,
            buffer_bytes=held.kept
            + step
            + copies
            + _spare_bytes(config, model, expert_map, rank, weight_bytes),
            ubatch_bytes=held.ubatches,
            graph_bytes=graph_bytes,
            state_bytes=state_bytes,
        )
        table.append(replace(row, kv_bytes=_kv_bytes(config, session.block, row)))
    return table


def _spare_bytes(
    config: RankConfig,
    model: ModelConfig,
    expert_map: ExpertMap,
    rank: int,
    weight_bytes: Callable[..., int],
) -> int:
    """Return the memory of one layer's experts, to which others come while the rank serves."""
    if config.experts.rebalance == "off" or config.dims.alone:
        return 0
    layer = moe_layers(model)[0]
    experts = {(layer, expert) for expert in expert_map.experts_of(rank, layer)}
    return weight_bytes(model, rank=rank, experts=experts)


def _state_bytes(config: RankConfig, selection: Selection, shape: BackendShape) -> int:
    """Return the bytes of states of linear attention, of running sequences and of prefixes, with inputs of drafts."""
    chosen, place = selection.linear_attention_class, (shape.linear_specs, shape.dtype)
    if chosen is None:
        return 0
    num_slots = config.cache.num_state_slots(config.scheduler.max_num_seqs)
    drafts = (1 + config.scheduler.max_num_seqs) * chosen.draft_bytes(*place)
    return num_slots * chosen.slot_bytes(*place) + drafts


def _expert_range(experts: Sequence[int], spare: int) -> str:
    """Return the experts of a rank before any load is known, and its redundant slots."""
    own = experts[: len(experts) - spare]
    beside = f" +{spare}" if spare else ""
    return f"{own[0]}-{own[-1]}{beside}" if own else f"none{beside}"


def _kv_bytes(config: RankConfig, block_bytes: int, row: RankRow) -> int | None:
    """Return the configured size, or an upper bound if there is a GPU; the rank measures after a profiling forward."""
    cache = config.cache
    if cache.num_blocks != "auto":
        return cache.num_blocks * block_bytes
    total = gpu_bytes()
    return None if total is None else max(0, int(total * cache.memory_fraction) - row.fixed_bytes)


def too_little_on_gpu(config: RankConfig, rows: Sequence[RankRow]) -> str | None:
    """Return why the ranks of this table do not fit on GPUs like the one here, with what to change; or None."""
    total, cache = gpu_bytes(), config.cache
    if total is None:
        return None
    row = max(rows, key=lambda row: row.fixed_bytes)
    buffers = row.fixed_bytes - row.weight_bytes - row.state_bytes - row.adapter_bytes
    adapters = f"{size(row.adapter_bytes)} for LoRA adapters, " if row.adapter_bytes else ""
    states = f"{size(row.state_bytes)} for states of linear attention, " if row.state_bytes else ""
    needs = (
        f"rank {row.rank} needs {size(row.weight_bytes)} for weights, {adapters}{states}"
        f"{size(buffers)} for buffers and graphs"
    )
    remedies = "take more ranks (cluster.ranks), lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    if cache.num_blocks != "auto":
        kv_bytes = row.kv_bytes or 0
        if row.fixed_bytes + kv_bytes <= total:
            return None
        return (
            f"{needs}, and cache.num_blocks {cache.num_blocks} takes {size(kv_bytes)}: more than the {size(total)} of "
            f"its GPU; {remedies}, or lower cache.num_blocks"
        )
    allowed = int(total * cache.memory_fraction)
    if row.fixed_bytes < allowed:
        return None
    return (
        f"{needs}, which leaves nothing for the KV cache of the {size(allowed)} that cache.memory_fraction "
        f"{cache.memory_fraction:g} allows of its GPU; {remedies}, or raise cache.memory_fraction"
    )


def gpu_bytes() -> int | None:
    """Return the memory of this machine's first GPU; all GPUs are assumed to be equal."""
    if not torch.cuda.is_available():
        return None
    total: int = torch.cuda.get_device_properties(0).total_memory
    return total


def image_bytes(config: RankConfig, model: ModelConfig, value_bytes: int) -> int:
    """Return bytes of the largest image in the vision tower, and of embeddings: those kept and those of a step."""
    spec = model.vision
    if spec is None:
        return 0
    limits = ImageLimits.of(config, spec)
    rows = config.scheduler.max_num_batched_tokens * spec.num_outputs * spec.output_size
    kept = limits.cache_bytes(spec, value_bytes)
    return limits.forward_bytes(spec, value_bytes) + kept + rows * value_bytes


def _model_bytes(
    config: RankConfig, model: ModelConfig, dtype: torch.dtype, num_tokens: int
) -> int:
    """Return bytes of the inputs of a step, its hidden states, and the logits of a full batch in float32."""
    seqs = config.scheduler.max_num_seqs
    blocks = -(-int(config.model.max_model_len) // config.cache.block_size)
    inputs = INT64 * (3 * num_tokens + seqs + 2 * seqs * blocks)
    logits = 4 * config.max_logits_rows * model.vocab_size
    return inputs + logits + num_tokens * dtype.itemsize * 4 * model.hidden_size
