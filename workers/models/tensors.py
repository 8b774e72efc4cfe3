"""Which tensors a checkpoint of a config holds: names, shapes, and whose they are.

The one source of truth for the loader, the memory table and the model's weight slots. Imports
neither torch nor safetensors. V vocabulary, D hidden, d head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.placement import ExpertPlacement
from workers.models.config import DtypeName, Qwen3MoeConfig

DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TensorSpec:
    """Shape on disk; `expert` is the expert it belongs to, None when every rank holds it."""

    shape: tuple[int, ...]
    expert: int | None = None


def tensor_specs(config: Qwen3MoeConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint under its Hugging Face name, in the order of the forward."""
    D, V = config.hidden_size, config.vocab_size
    specs = {"model.embed_tokens.weight": TensorSpec((V, D))}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        specs |= {prefix + name: spec for name, spec in _layer_specs(config, layer)}
    specs["model.norm.weight"] = TensorSpec((D,))
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = TensorSpec((V, D))
    return specs


def expected_tensors(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Disk name -> shape of every tensor of the checkpoint."""
    return {name: spec.shape for name, spec in tensor_specs(config).items()}


def rank_tensors(
    config: Qwen3MoeConfig, placement: ExpertPlacement, rank: int
) -> dict[str, tuple[int, ...]]:
    """Disk name -> shape of what one rank reads: all shared tensors and its own experts'."""
    local = placement.local_experts(rank)
    return {
        name: spec.shape
        for name, spec in tensor_specs(config).items()
        if spec.expert is None or spec.expert in local
    }


def rank_weight_bytes(
    config: Qwen3MoeConfig, placement: ExpertPlacement, rank: int, dtype: DtypeName
) -> int:
    """Bytes of one rank's weights in memory (norms, a few KiB, may take twice their share)."""
    shapes = rank_tensors(config, placement, rank).values()
    return sum(map(math.prod, shapes)) * DTYPE_BYTES[dtype]


def kv_block_bytes(config: Qwen3MoeConfig, block_size: int, dtype: DtypeName) -> int:
    """Bytes of one KV block over all layers, K and V."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * DTYPE_BYTES[dtype]
    return config.num_hidden_layers * block_size * per_token


def _layer_specs(config: Qwen3MoeConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    D, d = config.hidden_size, config.head_dim
    widths = {
        "q_proj": (config.q_size, D),
        "k_proj": (config.kv_size, D),
        "v_proj": (config.kv_size, D),
        "o_proj": (D, config.q_size),
    }
    yield "input_layernorm.weight", TensorSpec((D,))
    for name, shape in widths.items():
        yield f"self_attn.{name}.weight", TensorSpec(shape)
        if config.attention_bias:
            yield f"self_attn.{name}.bias", TensorSpec(shape[:1])
    yield "self_attn.q_norm.weight", TensorSpec((d,))
    yield "self_attn.k_norm.weight", TensorSpec((d,))
    yield "post_attention_layernorm.weight", TensorSpec((D,))
    if not config.is_moe_layer(layer):
        yield from _mlp_specs("mlp.", D, config.intermediate_size, None)
        return
    yield "mlp.gate.weight", TensorSpec((config.num_experts, D))
    for expert in range(config.num_experts):
        yield from _mlp_specs(f"mlp.experts.{expert}.", D, config.moe_intermediate_size, expert)


def _mlp_specs(
    prefix: str, D: int, width: int, expert: int | None
) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}gate_proj.weight", TensorSpec((width, D), expert)
    yield f"{prefix}up_proj.weight", TensorSpec((width, D), expert)
    yield f"{prefix}down_proj.weight", TensorSpec((D, width), expert)
