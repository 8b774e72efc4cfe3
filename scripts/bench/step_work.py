"""Counts the bytes, FLOPs and link bytes of one step on one rank, part by part. Pure arithmetic.

Routing is even. T tokens of the rank, D hidden, E experts, K experts per token, R ranks, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from kernels.interface.kv_layout import layout_of
from kernels.routing.expert_map import ContiguousMap
from workers.specs.model import GqaSpec, MlaSpec, ModelConfig, weight_map
from workers.specs.weight_map import FP8_BLOCK, WeightEntry, WeightKind
from workers.weights.tensors import DTYPE_BYTES, four_bit_parameters, rank_weights


class StepPart(StrEnum):
    """The parts of a step: first the parts of a layer in order, then the parts outside layers."""

    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear attention"
    QK_NORM = "qk norm, rope, KV write"
    DENSE = "dense GEMM"
    NORMS = "norms"
    ROUTING = "routing"
    DISPATCH = "dispatch"
    EXPERT_ORDER = "expert order"
    GROUPED = "grouped GEMM"
    ACTIVATION = "activation"
    COMBINE = "combine"
    SAMPLING = "sampling"
    COPIES = "copies"
    VOTES = "votes"
    OTHER = "other"

    @property
    def kind(self) -> "LayerKind":
        """The kind of layer that the part belongs to."""
        return _KINDS.get(self, LayerKind.DENSE)


class LayerKind(StrEnum):
    """The kinds of layers that a step's time divides by; `dense` has all projections, norms, and the head."""

    FULL_ATTENTION = "full attention"
    DELTA_NETS = "delta nets"
    EXPERTS = "experts"
    DENSE = "dense"


_KINDS = {
    StepPart.ATTENTION: LayerKind.FULL_ATTENTION,
    StepPart.QK_NORM: LayerKind.FULL_ATTENTION,
    StepPart.LINEAR_ATTENTION: LayerKind.DELTA_NETS,
    StepPart.ROUTING: LayerKind.EXPERTS,
    StepPart.DISPATCH: LayerKind.EXPERTS,
    StepPart.EXPERT_ORDER: LayerKind.EXPERTS,
    StepPart.GROUPED: LayerKind.EXPERTS,
    StepPart.ACTIVATION: LayerKind.EXPERTS,
    StepPart.COMBINE: LayerKind.EXPERTS,
}


@dataclass(frozen=True)
class StepShape:
    """One step of one rank; all ranks have equal steps.

    context    tokens that each of `tokens` attends to, on average
    kv_reads   tokens with K and V that are read from the cache
    sampled    tokens with computed logits
    fp8        whether the experts' weights are held and multiplied in FP8, and dense ones that the checkpoint stores
               in FP8; rows travel to the experts in FP8 then
    four_bit   whether experts and projections that the checkpoint packs in four bits are held so
    fp8_cache  whether K and V are cached in FP8
    states     dtype of the states of linear attention; None: that of the checkpoint
    """

    tokens: float
    context: float
    kv_reads: float
    sampled: float
    fp8: bool = False
    four_bit: bool = False
    fp8_cache: bool = False
    states: str | None = None


@dataclass(frozen=True)
class Work:
    """The work of one part in one step.

    memory_bytes      reads of weights, K and V, which no implementation can avoid
    activation_bytes  inputs and outputs in memory, if the part is a kernel of its own
    flops             in the model's dtype; fp8_flops: in FP8
    link_bytes        bytes that leave the rank; an equal number arrives
    """

    memory_bytes: float = 0.0
    flops: float = 0.0
    link_bytes: float = 0.0
    activation_bytes: float = 0.0
    fp8_flops: float = 0.0


def step_work(model: ModelConfig, num_ranks: int, shape: StepShape) -> dict[StepPart, Work]:
    """Return the work of every part. Avoidable parts (copies, votes, a separate activation) have no work."""
    found = {part: Work() for part in StepPart}
    return found | _outside_experts(model, num_ranks, shape) | _experts(model, num_ranks, shape)


def _outside_experts(model: ModelConfig, num_ranks: int, shape: StepShape) -> dict[StepPart, Work]:
    tokens, layers = shape.tokens, model.num_layers
    dim, moe = model.hidden_size, model.num_moe_layers
    values = _attention_values(model.attention)
    attending = len(model.attention_specs)
    width = DTYPE_BYTES[model.dtype]
    weights = _weights(model, num_ranks)
    head = model.vocab_size * dim
    # The embedding is looked up, the same table is read whole where it serves as the head.
    dense = weights[StepPart.DENSE] + head * model.tie_word_embeddings
    projections = weights[StepPart.DENSE] - head * (not model.tie_word_embeddings)
    fp8_values = _fp8_values(model) if shape.fp8 else 0.0
    spared = _spared_bytes(model, num_ranks)[StepPart.DENSE] if shape.four_bit else 0.0
    dense_values = tokens * (
        2 * layers * dim + attending * values.projected + moe * (dim + model.num_experts)
    )
    dense_values += tokens * sum(
        spec.channels + 2 * spec.value_size + 2 * spec.num_value_heads
        for spec in model.linear_specs
    )
    dense_values += shape.sampled * (dim + model.vocab_size)
    # Layers with a window read its keys alone.
    specs = [replace(spec, fp8_cache=shape.fp8_cache) for spec in model.attention_specs]
    context = max(1.0, shape.context)
    seen = [min(1.0, (spec.window or context) / context) for spec in specs]
    cached = sum(
        of * layout_of(spec).block_bytes(1, width) for of, spec in zip(seen, specs, strict=True)
    )
    return {
        StepPart.ATTENTION: Work(
            memory_bytes=shape.kv_reads * cached,
            flops=2.0 * sum(seen) * tokens * values.of_pair * shape.context,
            activation_bytes=width * attending * tokens * values.attended,
        ),
        StepPart.LINEAR_ATTENTION: _linear_attention(model, shape),
        StepPart.QK_NORM: Work(
            width * weights[StepPart.QK_NORM],
            activation_bytes=width * attending * tokens * 2 * values.rotated,
        ),
        StepPart.DENSE: Work(
            width * (dense - fp8_values) + fp8_values - spared,
            flops=2.0 * (tokens * (projections - fp8_values) + shape.sampled * head),
            fp8_flops=2.0 * tokens * fp8_values,
            activation_bytes=width * dense_values,
        ),
        # Two a layer, each of which adds: reads two tensors and writes two.
        StepPart.NORMS: Work(
            width * weights[StepPart.NORMS], activation_bytes=width * 8 * layers * tokens * dim
        ),
        StepPart.SAMPLING: Work(activation_bytes=width * shape.sampled * model.vocab_size),
        StepPart.OTHER: Work(activation_bytes=width * 2 * tokens * dim),
    }


@dataclass(frozen=True)
class _AttentionValues:
    """Values of one token in one layer's attention.

    projected   in and out of the projections, without the hidden state
    rotated     that norm, rotation and KV write read and write
    attended    in and out of the attention itself
    of_pair     multiplied for each token that this one attends to
    """

    projected: int
    rotated: int
    attended: int
    of_pair: int


def _linear_attention(model: ModelConfig, shape: StepShape) -> Work:
    """Each sequence reads and writes its states; a token multiplies the state of a head three times."""
    specs, width = model.linear_specs, DTYPE_BYTES[model.dtype]
    if shape.states is not None:
        specs = tuple(replace(spec, state_dtype=shape.states) for spec in specs)
    states = sum(spec.slot_bytes(width) for spec in specs)
    values = sum(spec.channels + spec.value_size for spec in specs)
    products = sum(spec.value_size * spec.key_dim for spec in specs)
    return Work(
        memory_bytes=2 * shape.sampled * states,
        flops=6.0 * shape.tokens * products,
        activation_bytes=width * shape.tokens * values,
    )


def _attention_values(spec: GqaSpec | MlaSpec | None) -> _AttentionValues:
    if spec is None:
        return _AttentionValues(0, 0, 0, 0)
    if isinstance(spec, GqaSpec):
        q, kv = spec.q_size, spec.kv_size
        projected = 2 * q + 2 * kv + spec.gate_size
        return _AttentionValues(projected, q + 2 * kv, 2 * q + 2 * kv, 2 * q)
    q, o, width = spec.q_size, spec.o_size, spec.dims.width
    # Keys and values of expanded latents; absorbed into q and o they take more.
    pair = q + o
    rotated = spec.num_heads * spec.rope_dim + width
    return _AttentionValues(q + 2 * (spec.q_rank or 0) + width + o, rotated, q + width + o, pair)


def _experts(model: ModelConfig, num_ranks: int, shape: StepShape) -> dict[StepPart, Work]:
    tokens, moe = shape.tokens, model.num_moe_layers
    dim, inner, top_k = model.hidden_size, model.moe.intermediate_size, model.top_k
    width = DTYPE_BYTES[model.dtype]
    missed = (1 - top_k / model.num_experts) ** (tokens * num_ranks)  # experts without a token
    read = _weights(model, num_ranks)[StepPart.GROUPED] * (1 - missed)
    read_bytes = read if shape.fp8 else width * read
    if shape.four_bit:
        read_bytes -= _spared_bytes(model, num_ranks)[StepPart.GROUPED] * (1 - missed)
    rows, pairs = moe * tokens, moe * tokens * top_k
    remote = _remote_ranks(model, num_ranks)
    one_way = width * rows * remote * dim
    there = rows * remote * dim * (1 + 4 / FP8_BLOCK) if shape.fp8 else one_way
    flops = 2.0 * pairs * 3 * dim * inner
    return {
        StepPart.ROUTING: Work(activation_bytes=rows * (width * model.num_experts + 12 * top_k)),
        StepPart.DISPATCH: Work(
            link_bytes=there, activation_bytes=width * rows * dim * (1 + remote)
        ),
        # int32 ids of all ranks' rows, the places of their pairs, and the rows at this rank's places
        StepPart.EXPERT_ORDER: Work(activation_bytes=4 * pairs * (2 * num_ranks + 1)),
        StepPart.GROUPED: Work(
            read_bytes,
            flops=0.0 if shape.fp8 else flops,
            fp8_flops=flops if shape.fp8 else 0.0,
            activation_bytes=width * pairs * 2 * (dim + inner),
        ),
        # reads the experts' rows, writes sums for other ranks, reads sums of other ranks, writes the sums of its tokens
        StepPart.COMBINE: Work(
            link_bytes=one_way,
            activation_bytes=width * rows * dim * (top_k + 2 * remote + 1),
        ),
    }


@lru_cache(maxsize=4)
def _weights(model: ModelConfig, num_ranks: int) -> Mapping[StepPart, float]:
    """Return the number of weight values that each part of rank 0 reads, without the embedding and a vision tower."""
    expert_map, model = ContiguousMap(model.num_experts, num_ranks), replace(model, vision=None)
    found = dict.fromkeys((StepPart.QK_NORM, StepPart.DENSE, StepPart.NORMS, StepPart.GROUPED), 0.0)
    for entry in rank_weights(model, expert_map, 0):
        if entry.kind != WeightKind.EMBEDDING:
            found[_part_of_weight(entry)] += entry.size
    return found


@lru_cache(maxsize=4)
def _fp8_values(model: ModelConfig) -> float:
    """Return the number of values of dense products that the checkpoint stores in FP8."""
    entries = (entry for entry in weight_map(model) if entry.expert is None)
    return float(sum(entry.size for entry in entries if entry.fp8 is not None))


@lru_cache(maxsize=4)
def _spared_bytes(model: ModelConfig, num_ranks: int) -> Mapping[StepPart, float]:
    """Return the bytes that rank 0 reads less in each part because weights are packed in four bits."""
    expert_map, dense = ContiguousMap(model.num_experts, num_ranks), four_bit_parameters(model)
    found = dict.fromkeys((StepPart.DENSE, StepPart.GROUPED), 0.0)
    for entry in rank_weights(model, expert_map, 0):
        kept = entry.expert is not None or entry.parameter in dense
        if entry.four_bit is not None and kept:
            width = DTYPE_BYTES[model.dtype]
            found[_part_of_weight(entry)] += width * entry.size - entry.four_bit_bytes
    return found


def _part_of_weight(entry: WeightEntry) -> StepPart:
    if entry.expert is not None:
        return StepPart.GROUPED
    parts = {WeightKind.QK_NORM: StepPart.QK_NORM, WeightKind.NORM: StepPart.NORMS}
    return parts.get(entry.kind, StepPart.DENSE)


def _remote_ranks(model: ModelConfig, num_ranks: int) -> float:
    """Return the mean number of other ranks with an expert of a token."""
    others = math.comb(model.num_experts - model.num_experts // num_ranks, model.top_k)
    missed = others / math.comb(model.num_experts, model.top_k)
    return (num_ranks - 1) * (1 - missed)
