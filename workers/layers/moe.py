"""The experts of a decoder layer: router, all-to-all, grouped products. Knows no model and no checkpoint.

T tokens, D hidden, E experts, e experts of this rank, K experts per token, I expert width, R routed rows.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from kernels.all2all.base import ExpertInput
from kernels.backends.select import Backends
from kernels.backends.side_stream import SideWork
from kernels.lora.experts import ExpertAdapters
from kernels.lora.rows import AdapterRows
from kernels.routing.expert_map import ExpertMap, kept_runs, runs
from kernels.routing.forced_routing import ForcedRouting
from kernels.slot_table import SlotTable
from workers.layers.builder import LayerBuilder
from workers.layers.linear import Rows
from workers.layers.mlp import SharedExpert
from workers.layers.norm import Gate
from workers.layers.router import route_tokens
from workers.specs.model import MoeSpec
from workers.step.forward_batch import ForwardBatch

ExpertWeights = Any  # torch.Tensor or BlockWeights, by the grouped product
FREE = -1
"""In place of an expert: the weights of the slot are undefined."""


class SpareWeights(NamedTuple):
    """Memory of the same form as the weights of a MoeBlock, under the same names."""

    w13_e2ID: ExpertWeights
    w2_eDI: ExpertWeights
    b13_e2I: torch.Tensor | None
    b2_eD: torch.Tensor | None

    @property
    def parameters(self) -> tuple[ExpertWeights, ...]:
        """As MoeBlock.parameters."""
        return tuple(weights for weights in self if weights is not None)


class StagedMap(NamedTuple):
    """A new map of a layer. experts: of this rank's slots; table and experts_e: on the device."""

    experts: list[int]
    table: SlotTable
    experts_e: torch.Tensor

    @classmethod
    def of(cls, slots: Sequence[int], base: ExpertMap, rank: int, device: torch.device) -> Self:
        """Return the map of the expert in every slot; the slots of ranks are those of `base`."""
        own = base.slots_of(rank)
        experts = list(slots[own.start : own.stop])
        table = SlotTable.of(slots, base.starts, base.num_experts, rank, device)
        return cls(experts, table, torch.tensor(experts, dtype=torch.int32, device=device))


class MoeBlock:
    """residual + the weighted sum of the chosen experts' MLPs + the shared expert's MLP, of norm(residual).

    wanted   the expert of each slot of this rank
    held     the expert that each slot has the weights of, or FREE; a view by `with_backends` shares the list
    table    the map of the layer; None: slots are experts
    experts_e   int32, beside a table: `wanted` on the device
    lora   the slots of adapters of the experts; None: the experts take none
    """

    lora: ExpertAdapters | None = None

    def __init__(self, builder: LayerBuilder, spec: MoeSpec, layer: int):
        self.spec = spec
        self._layer = layer
        self.route_by(builder.forced_routing)
        self.all2all = builder.backends.all2all
        self.grouped_gemm = builder.backends.grouped_gemm
        self.expert_load = builder.backends.expert_load
        self._device, self._placement = builder.device, builder.placement
        self.held: list[int] = []
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
        self._hold_empty(0)
        self.hold_experts(builder.expert_map, builder.rank)
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
    def parameters(self) -> tuple[ExpertWeights, ...]:
        """All tensors with a first axis of this rank's slots."""
        return (self.w13_e2ID, self.w2_eDI, *(self._biases or ()))

    @property
    def _biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.b13_e2I is None or self.b2_eD is None:
            return None
        return self.b13_e2I, self.b2_eD

    def route_by(self, forced: Callable[..., ForcedRouting] | None) -> None:
        """Let the layer's router choose experts, or a law instead; see DecoderLM."""
        self.forced_routing = None if forced is None else forced(layer=self._layer)

    def hold_experts(self, expert_map: ExpertMap, rank: int) -> None:
        """Take the place of `rank` in a map; weights that are held stay, the others are undefined until `filled`."""
        self.wanted = [*expert_map.experts_of(rank, self._layer)]
        before, weights = self.held, self.parameters if self.held else ()
        kept = set(before) & set(self.wanted)
        if len(before) != len(self.wanted) or any(
            before.index(expert) != self.wanted.index(expert) for expert in kept
        ):
            self._hold_empty(len(self.wanted))
            for to, at in kept_runs(before, self.wanted, kept):
                for new, source in zip(self.parameters, weights, strict=True):
                    new[to].copy_(source[at])
        self.held = [expert if expert in kept else FREE for expert in self.wanted]
        self.table = self.experts_e = None
        if self._placement.movable or not expert_map.is_identity:
            slots = expert_map.experts(self._layer)
            _, self.table, self.experts_e = StagedMap.of(slots, expert_map, rank, self._device)

    def spare_weights(self) -> "SpareWeights":
        """Return memory for the weights of as many experts as the rank has slots in this layer."""
        before = self.parameters
        self._hold_empty(len(self.wanted))
        spare = SpareWeights(self.w13_e2ID, self.w2_eDI, self.b13_e2I, self.b2_eD)
        self.w13_e2ID, self.w2_eDI, *biases = before
        self.b13_e2I, self.b2_eD = biases or (None, None)
        return spare

    def commit(
        self, places: Sequence[tuple[int, int]], spare: "SpareWeights", staged: "StagedMap"
    ) -> None:
        """Take weights of `spare` and the map of the layer in place, on the current stream.

        places   pairs of a slot and of the place of its new weights in `spare`
        """
        assert self.table is not None and self.experts_e is not None, "the map of this layer stays"
        for to, at in runs(places):
            for weights, new in zip(self.parameters, spare.parameters, strict=True):
                weights[to].copy_(new[at])
        self.table.copy_from(staged.table)
        self.experts_e.copy_(staged.experts_e)
        self.wanted[:] = self.held[:] = staged.experts

    def adapter_places(self, num_experts: int) -> torch.Tensor:
        """Return int32: the place of the expert of each slot among the `num_experts` of which the rank has adapters.

        They are the experts of the slots, or where the layer has a map all experts: the places move with the map.
        """
        if self.experts_e is not None:
            assert num_experts == self.spec.num_experts, num_experts
            return self.experts_e
        assert num_experts == len(self.wanted), num_experts
        return torch.arange(num_experts, dtype=torch.int32, device=self._device)

    def missing(self) -> list[int]:
        """Return the experts that the rank has slots for, but not the weights."""
        pairs = zip(self.wanted, self.held, strict=True)
        return [wanted for wanted, held in pairs if wanted != held]

    def filled(self) -> None:
        """Note that the weights of all experts are there."""
        self.held[:] = self.wanted

    def with_backends(self, backends: Backends) -> Self:
        """Return a view of the same weights that calls another all-to-all and grouped product of the same kinds."""
        view = copy(self)
        view.all2all, view.grouped_gemm = backends.all2all, backends.grouped_gemm
        return view

    def forward(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Every rank calls this in every step, with tokens or without. residual_TD is overwritten."""
        gate = None if self.shared is None else self.shared.gate_of(len(residual_TD))
        residual_TD, rows_TD, h_TD = self._normed(residual_TD, hidden_TD, batch.adapters, gate)
        # The shared expert is computed while the rows travel. Where none do, it runs beside the routed experts.
        beside = self.shared is not None and self.all2all.no_overlap_reason is not None
        side = SideWork(self._device, len(h_TD), allowed=beside)
        slots_TK, topk_weights_TK = self._route(h_TD, batch)
        slots_T = None if self.lora is None else batch.adapter_slots
        if (column := self.all2all.slot_column) is not None:
            slots_TK, topk_weights_TK = column.beside(slots_TK, topk_weights_TK, slots_T)
        pending = self.all2all.dispatch(h_TD, slots_TK, topk_weights_TK)
        if self.shared is not None:
            inputs = residual_TD, rows_TD, h_TD, gate, batch.adapters
            residual_TD = side.run(self.shared.add_to, *inputs)
        expert_input = pending.wait()
        if slots_T is not None and not self.all2all.moves_rows:
            assert isinstance(expert_input, ExpertInput), "masked rows carry no adapters"
            expert_input = expert_input.with_slots(slots_T)
        if self.expert_load.counting:
            self.expert_load.add(self._layer, expert_input.offs_e)
        adapters = None if batch.adapters is None else self.lora
        y_RD = self.grouped_gemm(
            expert_input, self.w13_e2ID, self.w2_eDI, self.spec.activation, self._biases, adapters
        )
        routed_TD = self.all2all.combine(y_RD, expert_input.handle).wait()
        side.wait()
        return residual_TD, routed_TD

    def _normed(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        adapters: AdapterRows | None,
        gate: Gate | None,
    ) -> tuple[torch.Tensor, Rows, torch.Tensor]:
        """Return the sum of both, and its norm in the form that the shared expert takes and in the model's dtype."""
        buffer_TD = self.all2all.dispatch_buffer(len(residual_TD))
        if self.shared is None or buffer_TD is not None:
            residual_TD, h_TD = self.norm.add(residual_TD, hidden_TD, buffer_TD, gate)
            return residual_TD, h_TD, h_TD
        return self.norm.add_for_both(self.shared.gate_up, residual_TD, hidden_TD, adapters, gate)

    def _route(self, h_TD: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of each row's experts, and their weights."""
        copies, table = self._placement.copies, self.table
        spread = batch.spread_copies if copies == "auto" else copies == "all"
        if self.forced_routing is not None:
            self.router(h_TD)  # keeps the cost of the step
            return self.forced_routing(
                batch.input_ids,
                batch.positions,
                batch.num_token_non_padded,
                table,
                spread=spread,
            )
        return route_tokens(
            h_TD,
            self.router,
            self.spec.router,
            batch.num_token_non_padded,
            self.score_bias_E,
            table,
            spread=spread,
        )


def flat(parameters: Sequence[ExpertWeights]) -> list[torch.Tensor]:
    """Return the tensors of weights of any form, each with a first axis of slots."""
    return [
        tensor
        for weights in parameters
        for tensor in ([weights] if isinstance(weights, torch.Tensor) else weights.tensors)
    ]
