"""Which tensors a checkpoint of a config holds: names, shapes, and whose they are.

The one source of truth for the loader, the memory table and the model's weight slots. Imports
neither torch nor safetensors. V vocabulary, D hidden, d head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.routing.placement import ExpertPlacement
from workers.models.qwen3_moe.config import DtypeName, Qwen3MoeConfig
from workers.weights.quantization import SCALE_SUFFIX

FP8_BLOCK, FP8_SCALE_BYTES = 128, 4  # as in kernels.block_fp8, which needs torch
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TensorSpec:
    """Shape on disk; `expert` is the expert it belongs to, None when every rank holds it.

    `quantised`: in FP8 on disk, with a tensor of scales beside it.
    """

    shape: tuple[int, ...]
    expert: int | None = None
    quantised: bool = False

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the scales: one for each block, also for those cut at the edges."""
        return tuple(-(-size // FP8_BLOCK) for size in self.shape)


def tensor_specs(config: Qwen3MoeConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint but scales under its Hugging Face name, in the order of the forward."""
    D, V = config.hidden_size, config.vocab_size
    specs = {"model.embed_tokens.weight": TensorSpec((V, D))}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        specs |= {prefix + name: spec for name, spec in _layer_specs(config, layer)}
    specs["model.norm.weight"] = TensorSpec((D,))
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = TensorSpec((V, D))
    quantization = config.quantization
    if quantization is None:
        return specs
    return {
        name: replace(spec, quantised=quantization.covers(name)) for name, spec in specs.items()
    }


def stores_fp8_experts(config: Qwen3MoeConfig) -> bool:
    """Whether the checkpoint has all of its experts in FP8."""
    if config.quantization is None:
        return False
    return all(spec.quantised for spec in tensor_specs(config).values() if spec.expert is not None)


def expected_tensors(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Disk name -> shape of every tensor of the checkpoint, scales included."""
    shapes = {}
    for name, spec in tensor_specs(config).items():
        shapes[name] = spec.shape
        if spec.quantised:
            shapes[name + SCALE_SUFFIX] = spec.scale_shape
    return shapes


def rank_tensors(
    config: Qwen3MoeConfig, placement: ExpertPlacement, rank: int
) -> dict[str, tuple[int, ...]]:
    """Disk name -> shape of what one rank holds: all shared tensors and its own experts'."""
    specs = _rank_specs(config, placement, rank)
    return {name: spec.shape for name, spec in specs.items()}


def rank_weight_bytes(
    config: Qwen3MoeConfig,
    placement: ExpertPlacement,
    rank: int,
    dtype: DtypeName,
    *,
    fp8_experts: bool = False,
) -> int:
    """Bytes of one rank's weights in memory (norms, a few KiB, may take twice their share).

    fp8_experts   the experts' product computes with FP8 weights; all else is held in `dtype`, whatever the
                  checkpoint holds
    """
    total = 0
    for spec in _rank_specs(config, placement, rank).values():
        if fp8_experts and spec.expert is not None:
            total += math.prod(spec.shape) + FP8_SCALE_BYTES * math.prod(spec.scale_shape)
        else:
            total += math.prod(spec.shape) * DTYPE_BYTES[dtype]
    return total


def _rank_specs(
    config: Qwen3MoeConfig, placement: ExpertPlacement, rank: int
) -> dict[str, TensorSpec]:
    local = placement.local_experts(rank)
    return {
        name: spec
        for name, spec in tensor_specs(config).items()
        if spec.expert is None or spec.expert in local
    }


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
