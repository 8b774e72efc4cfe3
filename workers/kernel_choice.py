"""What a rank's configuration and model ask of the kernels, and what follows from those chosen. Builds nothing."""

from typing import Any

import torch

from kernels.select import Selection
from workers.config import Auto, RankConfig
from workers.models.config import Qwen3MoeConfig
from workers.models.tensors import stores_fp8_experts


class GraphsUnavailableError(ValueError):
    """scheduler.cuda_graphs is true and cannot be."""


def kernel_shape(config: RankConfig, model: Qwen3MoeConfig) -> dict[str, Any]:
    """What `kernels.select.select` wants to know of ranks and model."""
    return {
        "num_ranks": config.num_ranks,
        "num_nodes": config.num_nodes,
        "dtype": getattr(torch, str(config.model.dtype)),
        "hidden_size": model.hidden_size,
        "expert_width": model.moe_intermediate_size,
        "head_dim": model.head_dim,
        "fp8_checkpoint": stores_fp8_experts(model),
        "num_experts": model.num_experts,
        "top_k": model.num_experts_per_tok,
        "max_num_tokens": config.scheduler.max_num_batched_tokens,
    }


def graphs_off(wanted: Auto | bool, selection: Selection, device: str) -> str | None:
    """Why no steps become CUDA graphs, or None where they do; `wanted` is scheduler.cuda_graphs, `device` a type.

    Raises GraphsUnavailableError, with the reason, where they are demanded and cannot be.
    """
    obstacle = selection.graph_obstacle
    if device != "cuda":
        obstacle = f"cluster.device is {device}"
    if obstacle is None:
        return "scheduler.cuda_graphs is false" if wanted is False else None
    if wanted is True:
        raise GraphsUnavailableError(
            f"scheduler.cuda_graphs is true, but {obstacle}; expected auto or false"
        )
    return obstacle
