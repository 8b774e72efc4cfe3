"""The shape that a rank's backends are chosen for, and forced routing. Builds nothing."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.backends.backend import BackendShape
from kernels.routing.forced_routing import ForcedRouting
from workers.config import RankConfig
from workers.models.specs import ModelConfig
from workers.weights.tensors import stores_fp8_experts


def backend_shape(config: RankConfig, model: ModelConfig) -> BackendShape:
    """Return the shape that the backends of these ranks and this model are chosen for and sized by."""
    return BackendShape(
        device=config.device,
        dtype=getattr(torch, str(config.model.dtype)),
        num_ranks=config.num_ranks,
        num_nodes=config.num_nodes,
        hidden_size=model.hidden_size,
        expert_width=model.moe.width,
        num_experts=model.num_experts,
        top_k=model.top_k,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        attention_specs=model.attention_specs,
        fp8_checkpoint=stores_fp8_experts(model),
        expert_bias=model.moe.bias,
    )


def forced_routing(
    config: RankConfig, model: ModelConfig, rank: int, device: torch.device
) -> Callable[..., ForcedRouting] | None:
    """Return a factory of each layer's forced routing; None where the router chooses."""
    routing = config.model.routing
    if routing.kind == "model":
        return None
    return partial(
        ForcedRouting,
        routing.kind,
        routing.s,
        num_experts=model.num_experts,
        top_k=model.top_k,
        rank=rank,
        num_ranks=config.num_ranks,
        device=device,
    )
