"""Sums and selections over a model's weight map: what a rank holds, in how many bytes. Needs no torch."""

from collections.abc import Container

from kernels.routing.placement import ExpertPlacement
from workers.models.registry import weight_map
from workers.models.specs import DtypeName, ModelConfig
from workers.weights.weight_map import Scaling, WeightEntry

DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def stores_fp8_experts(config: ModelConfig) -> bool:
    """Return whether the checkpoint has all of its experts in FP8 that blocks of 128 x 128 hold without rounding."""
    if config.quantization is None:
        return False
    return all(
        entry.fp8 is not None and entry.fp8.scaling != Scaling.CHANNEL
        for entry in weight_map(config)
        if entry.expert is not None
    )


def experts_with_row_scales(config: ModelConfig) -> bool:
    """Return whether the checkpoint has experts in FP8 with one scale a row."""
    experts = (entry.fp8 for entry in weight_map(config) if entry.expert is not None)
    return any(fp8 is not None and fp8.scaling == Scaling.CHANNEL for fp8 in experts)


def rank_weights(
    config: ModelConfig,
    placement: ExpertPlacement,
    rank: int,
    *,
    experts: Container[int] | None = None,
) -> list[WeightEntry]:
    """Return the tensors of one rank: those of its experts, and every tensor that belongs to no expert.

    experts   return the tensors of these experts alone, as far as the rank holds them
    """
    local = placement.local_experts(rank)
    if experts is not None:
        chosen = [expert for expert in local if expert in experts]
        return [entry for entry in weight_map(config) if entry.expert in chosen]
    return [entry for entry in weight_map(config) if entry.expert is None or entry.expert in local]


def rank_weight_bytes(
    config: ModelConfig,
    placement: ExpertPlacement,
    rank: int,
    dtype: DtypeName,
    *,
    fp8_experts: bool = False,
) -> int:
    """Return the bytes of one rank's weights in memory (norms, a few KiB, may take twice as much).

    fp8_experts   the experts' product computes with FP8 weights; all else is held in `dtype`, whatever the
                  checkpoint holds
    """
    width = DTYPE_BYTES[dtype]
    return sum(
        entry.fp8_bytes if fp8_experts and entry.expert is not None else width * entry.size
        for entry in rank_weights(config, placement, rank)
    )
