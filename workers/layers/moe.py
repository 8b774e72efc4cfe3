"""The experts of a decoder layer: router, all-to-all, grouped products. Knows no model and no checkpoint.

T tokens, D hidden, E experts, e experts of this rank, K experts per token, I expert width, R routed rows.
"""

from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from typing import Any, Self

import torch

from kernels.backends.select import Backends
from kernels.routing.expert_map import ExpertMap, kept_runs
from kernels.routing.forced_routing import ForcedRouting
from workers.layers.builder import LayerBuilder
from workers.layers.mlp import SharedExpert
from workers.layers.router import route_tokens
from workers.specs.model import MoeSpec
from workers.step.forward_batch import ForwardBatch

ExpertWeights = Any  # torch.Tensor or BlockWeights, by the grouped product


class MoeBlock:
    """residual + the weighted sum of the chosen experts' MLPs + the shared expert's MLP, of norm(residual)."""

    def __init__(self, builder: LayerBuilder, spec: MoeSpec, layer: int):
        self.spec = spec
        self._layer = layer
        self.route_by(builder.forced_routing)
        self.all2all = builder.backends.all2all
        self.grouped_gemm = builder.backends.grouped_gemm
        self.expert_load = builder.backends.expert_load
        self.expert_map = builder.expert_map
        self.experts = self.expert_map.experts_of(builder.rank)
        self._dim = dim = builder.hidden_size
        self.norm = builder.norm(dim)
        self.router = builder.dense(spec.num_experts, dim, bias=spec.router.logit_bias)
        self.score_bias_E = None
        if spec.router.bias:
            # float32 in every model: scores of experts differ by less than bfloat16 resolves
            self.score_bias_E = builder.empty(spec.num_experts, dtype=torch.float32)
        self._empty = partial(
            self.grouped_gemm.empty_weights, device=builder.device, dtype=builder.dtype
        )
        self._empty_bias = builder.empty
        self._hold_empty(len(self.experts))
        self.shared = None if spec.shared is None else SharedExpert(builder, spec.shared)

    def _hold_empty(self, num_experts: int) -> None:
        """Allocate weights and biases of `num_experts`."""
        dim, width = self._dim, self.spec.intermediate_size
        self.w13_e2ID: ExpertWeights = self._empty(num_experts, 2 * width, dim)
        self.w2_eDI: ExpertWeights = self._empty(num_experts, dim, width)
        self.b13_e2I = self.b2_eD = None
        if self.spec.bias:
            self.b13_e2I = self._empty_bias(num_experts, 2 * width)
            self.b2_eD = self._empty_bias(num_experts, dim)

    @property
    def _biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.b13_e2I is None or self.b2_eD is None:
            return None
        return self.b13_e2I, self.b2_eD

    def route_by(self, forced: Callable[..., ForcedRouting] | None) -> None:
        """Let the layer's router choose experts, or a law instead; see DecoderLM."""
        self.forced_routing = None if forced is None else forced(layer=self._layer)

    def hold_experts(self, expert_map: ExpertMap, rank: int, kept: Collection[int]) -> None:
        """Allocate weights of the experts of `rank`, and keep the values of `kept`, which are held before and after."""
        before, weights = self.experts, (self.w13_e2ID, self.w2_eDI, *(self._biases or ()))
        self.expert_map, self.experts = expert_map, expert_map.experts_of(rank)
        self._hold_empty(len(self.experts))
        held_now = (self.w13_e2ID, self.w2_eDI, *(self._biases or ()))
        for to, at in kept_runs(before, self.experts, kept):
            for new, source in zip(held_now, weights, strict=True):
                new[to].copy_(source[at])

    def with_backends(self, backends: Backends) -> Self:
        """Return a view of the same weights that calls another all-to-all and grouped product of the same kinds."""
        view = copy(self)
        view.all2all, view.grouped_gemm = backends.all2all, backends.grouped_gemm
        return view

    def forward(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Every rank calls this in every step, with tokens or without. residual_TD is overwritten."""
        buffer_TD = self.all2all.dispatch_buffer(len(residual_TD))
        residual_TD, h_TD = self.norm.add(residual_TD, hidden_TD, buffer_TD)
        topk_idx_TK, topk_weights_TK = self._route(h_TD, batch)
        slots_TK = self.expert_map.to_slots(topk_idx_TK)
        pending = self.all2all.dispatch(h_TD, slots_TK, topk_weights_TK)
        if self.shared is not None:  # computed while the rows travel
            residual_TD = self.shared.add_to(residual_TD, h_TD)
        expert_input = pending.wait()
        if self.expert_load.counting:
            self.expert_load.add(self._layer, expert_input.offs_e)
        y_RD = self.grouped_gemm(
            expert_input, self.w13_e2ID, self.w2_eDI, self.spec.activation, self._biases
        )
        return residual_TD, self.all2all.combine(y_RD, expert_input.handle).wait()

    def _route(self, h_TD: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.forced_routing is not None:
            self.router(h_TD)  # keeps the cost of the step
            return self.forced_routing(batch.input_ids, batch.positions, batch.num_token_non_padded)
        return route_tokens(
            h_TD, self.router, self.spec.router, batch.num_token_non_padded, self.score_bias_E
        )
