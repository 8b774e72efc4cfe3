"""Decoder layers of one rank: the part that a model and the drafters of its next tokens have in common.

T tokens (padding included), D hidden, r rotated values of a head. Knows nothing of requests, steps or files.

Weights are plain tensors, not nn.Parameters in nn.Modules: nothing is trained here, and a step of a small model is
bound by Python and operator overhead. Run inside `torch.inference_mode()`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pkgutil import resolve_name
from typing import NamedTuple, Protocol, Self

import torch

from kernels import dense_fp8
from kernels.all2all.base import sum_partials
from kernels.backends.select import Backends
from kernels.lora.rows import AdapterRows
from kernels.routing.expert_map import ExpertMap
from kernels.routing.forced_routing import ForcedRouting
from workers.layers.builder import STILL, LayerBuilder, Placement
from workers.layers.moe import MoeBlock
from workers.layers.rope import build_rope_table, rope_axes
from workers.specs.model import LayerSpec, ModelConfig
from workers.step.forward_batch import ForwardBatch
from workers.weights.slots import Slot, parameter_of, slot_of
from workers.weights.tensors import four_bit_parameters, fp8_parameters, rank_weights

Sum = tuple[torch.Tensor, torch.Tensor | None]  # two parts, (residual, hidden), see AttentionBlock


class Mixer(Protocol):
    """The attention of a layer, or what is in its place."""

    def forward(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        rotation_T1r: torch.Tensor,
        adapters: AdapterRows | None = None,
    ) -> Sum: ...
    def with_backends(self, backends: Backends) -> Self: ...


class Mlp(Protocol):
    """The MLP of a layer, or its experts."""

    def forward(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> Sum: ...
    def with_backends(self, backends: Backends) -> Self: ...
    def hold_experts(self, expert_map: ExpertMap, rank: int) -> None: ...
    def route_by(self, forced: Callable[..., ForcedRouting] | None) -> None: ...


class Layer(NamedTuple):
    """The blocks of one decoder layer."""

    attention: Mixer
    mlp: Mlp


class LayerStack(ABC):
    """The layers of `config` on one rank, with the experts of this rank alone. `load_weights` fills it.

    max_positions    bound on the positions of a batch; None: the limit of the checkpoint
    forced_routing   forced_routing(layer=...) makes the replacement of a layer's router; None: routers choose
    placement        see LayerBuilder
    """

    def __init__(
        self,
        config: ModelConfig,
        backends: Backends,
        *,
        expert_map: ExpertMap,
        rank: int,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int | None = None,
        forced_routing: Callable[..., ForcedRouting] | None = None,
        placement: Placement = STILL,
    ):
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._expert_map, self._rank = expert_map, rank
        in_fp8 = backends.grouped_gemm.fp8_dense
        self._fp8 = fp8_parameters(config) if in_fp8 else frozenset[str]()
        builder = LayerBuilder(
            hidden_size=config.hidden_size,
            norm_eps=config.norm_eps,
            backends=backends,
            expert_map=expert_map,
            rank=rank,
            device=self.device,
            dtype=dtype,
            forced_routing=forced_routing,
            fp8=self._fp8,
            four_bit=four_bit_parameters(config) if backends.grouped_gemm.four_bit else {},
            norm_offset=config.norm_offset,
            placement=placement,
        )
        self._allocate(builder)
        self.layers = [
            self._layer(replace(builder, path=f"layers.{number}."), spec, number)
            for number, spec in enumerate(config.layers)
        ]
        num_positions = max_positions or config.max_position_embeddings
        self._rope_table = build_rope_table(config, num_positions, self.device)
        self._rope_axes = rope_axes(config, self.device)

    @abstractmethod
    def _allocate(self, builder: LayerBuilder) -> None:
        """Allocate the parameters beside the layers."""

    def _layer(self, builder: LayerBuilder, spec: LayerSpec, number: int) -> Layer:
        """Return the blocks of layer `number`. Kernels count the layers with each kind of cache apart."""
        before = self.config.layers[:number]
        same_cache = sum(layer.attention.cache == spec.attention.cache for layer in before)
        return Layer(
            resolve_name(spec.attention.block)(builder, spec.attention, same_cache),
            resolve_name(spec.mlp.block)(builder, spec.mlp, number),
        )

    def run_layers(
        self,
        residual_TD: torch.Tensor,
        batch: ForwardBatch,
        hidden_after: dict[int, torch.Tensor] | None = None,
        added: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return hidden_TD after the last layer; call `attention.plan(batch)` before. residual_TD is overwritten.

        hidden_after    by number of a layer, each set to hidden_TD after the layer
        added           [T, D] of the first layers, each added to hidden_TD after the layer
        """
        rotation_T1r = self.rotation(batch)
        hidden_TD = None
        for number, (attention, mlp) in enumerate(self.layers):
            residual_TD, hidden_TD = attention.forward(
                residual_TD, hidden_TD, rotation_T1r, batch.adapters
            )
            residual_TD, hidden_TD = mlp.forward(residual_TD, hidden_TD, batch)
            if number < len(added):
                residual_TD = residual_TD.add_(added[number])
            if hidden_after is not None and number in hidden_after:
                residual_TD, hidden_TD = add_hidden(residual_TD, hidden_TD), None
                hidden_after[number] = residual_TD.clone()
        return add_hidden(residual_TD, hidden_TD)

    def with_backends(self, backends: Backends) -> Self:
        """Return a view of the same weights that calls other attention and all-to-all."""
        view = copy(self)
        view.layers = [
            Layer(layer.attention.with_backends(backends), layer.mlp.with_backends(backends))
            for layer in self.layers
        ]
        return view

    def with_few_layers(self) -> Self:
        """Return a view that runs every kernel of the model: the first two layers of each spec.

        A layer that follows a layer of its spec adds the sums of that layer's experts, so one is not enough.
        """
        view, found = copy(self), Counter[LayerSpec]()
        view.layers = []
        for spec, layer in zip(self.config.layers, self.layers, strict=True):
            found[spec] += 1
            if found[spec] <= 2:
                view.layers.append(layer)
        return view

    def hold_experts(
        self,
        expert_map: ExpertMap,
        rank: int,
        forced_routing: Callable[..., ForcedRouting] | None = None,
    ) -> None:
        """Hold the experts of `rank` in `expert_map`; weights of `missing` experts are undefined until `filled`.

        Views by `with_backends` keep the weights of before.
        """
        self._expert_map, self._rank = expert_map, rank
        for layer in self.layers:
            layer.mlp.hold_experts(expert_map, rank)
        self.route_by(forced_routing)

    def moe_blocks(self) -> dict[int, MoeBlock]:
        """Return the layers with experts by their numbers."""
        blocks = {number: layer.mlp for number, layer in enumerate(self.layers)}
        return {number: block for number, block in blocks.items() if isinstance(block, MoeBlock)}

    def missing(self) -> set[tuple[int, int]]:
        """Return the (layer, expert) that this rank has a slot for, but not the weights."""
        blocks = self.moe_blocks().items()
        return {(number, expert) for number, block in blocks for expert in block.missing()}

    def filled(self) -> None:
        """Note that the weights of all experts have been read."""
        for block in self.moe_blocks().values():
            block.filled()

    def route_by(self, forced_routing: Callable[..., ForcedRouting] | None) -> None:
        """Let routers choose experts, or a law instead. Views by `with_backends` keep the choice of before."""
        for layer in self.layers:
            layer.mlp.route_by(forced_routing)

    @property
    def seat(self) -> tuple[ExpertMap, int]:
        """The map of experts, and the rank in it, that the model has weights for."""
        return self._expert_map, self._rank

    def rotation(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the rotations of all rows: complex64 [T, 1, r/2]."""
        positions_T3, axes_r = batch.rope_positions, self._rope_axes
        if positions_T3 is None or axes_r is None:
            return self._rope_table.index_select(0, batch.positions).unsqueeze(1)
        return self._rope_table.gather(0, positions_T3.index_select(1, axes_r)).unsqueeze(1)

    def compile_products(self, sizes: Sequence[int]) -> None:
        """Compile the dense products in FP8 for steps of these numbers of rows."""
        weights = (parameter_of(self, name) for name in sorted(self._fp8))
        dense_fp8.compile_products(weights, sizes, self._rank, self._expert_map.num_ranks)

    def weight_slots(self) -> dict[str, Slot]:
        """Return the destination of every entry of the weight map that this rank holds, by its key."""
        places = {
            (number, expert): place
            for number, block in self.moe_blocks().items()
            for place, expert in enumerate(block.wanted)
        }
        entries = rank_weights(self.config, self._expert_map, self._rank)
        return {entry.key: slot_of(self, entry, places) for entry in entries}


def add_hidden(residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of the two parts that blocks pass on, in residual_TD."""
    return residual_TD if hidden_TD is None else residual_TD.add_(sum_partials(hidden_TD))
