"""Where the matrices of routed experts lie in a slot of adapters, and which part of an adapter's tensors they are.

PEFT has two forms. Experts one by one: a pair of matrices for gate, up and down of each. Fused: one pair for a
parameter that holds all experts, A [E * r, K] with the ranks of an expert side by side, and B [N, r * E] with the
experts of a rank side by side; gate and up are one parameter then. Older versions of PEFT take the rows of such a
parameter for inputs, so that A and B change places. Needs the weight map alone.

E experts of the model, e of them with adapters on this rank, P parts, r the largest rank, N outputs and K inputs of a
product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from kernels.routing.expert_map import runs
from workers.adapters.peft_folder import LoraPair
from workers.lora_config import AdapterError
from workers.specs.weight_map import WeightEntry

GATE, UP = 0, 1
ModuleOf = Callable[[str], str]
Align = Callable[[int], int]
WRAPPED = ".base_layer"  # follows the name of a module for each further parameter of it


@dataclass(frozen=True)
class ExpertProduct:
    """One product of the experts of a layer: gate and up, with a part each, or down.

    block      path of the layer's experts in the model
    a, b       where A [e, P * r, K] and B [e, N, r] begin in a slot
    """

    block: str
    num_parts: int
    num_experts: int
    rows: int
    columns: int
    a: int
    b: int

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """(first row, end row, part) of B."""
        height = self.rows // self.num_parts
        return tuple((part * height, (part + 1) * height, part) for part in range(self.num_parts))


class SingleFill(NamedTuple):
    """One part of one expert, which a pair of its own fills. `place`: among the experts with adapters on this rank."""

    product: ExpertProduct
    part: int
    place: int


@dataclass(frozen=True)
class FusedFill:
    """One part of neighbouring experts, and where their matrices are in the tensors of a fused pair.

    places    of the experts among those with adapters on this rank
    experts   in the tensors, which have `num_experts`
    outputs   rows of B
    swapped   A and B have changed places
    """

    product: ExpertProduct
    part: int
    places: slice
    experts: slice
    num_experts: int
    outputs: slice
    swapped: bool

    def matrices(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [e, rank, K] and B [e, N / P, rank] of the tensors of the pair."""
        rank = len(a) // self.num_experts
        a_erK = a.view(self.num_experts, rank, -1)[self.experts]
        b_eNr = b.view(len(b), rank, self.num_experts)[:, :, self.experts].permute(2, 0, 1)
        if self.swapped:
            a_erK, b_eNr = b_eNr.transpose(1, 2), a_erK.transpose(1, 2)
        return a_erK, b_eNr[:, self.outputs]


ExpertFill = SingleFill | FusedFill


@dataclass
class _Layer:
    """The experts of one layer; `transposed`: a fused parameter has columns before rows in the checkpoint."""

    up: ExpertProduct
    down: ExpertProduct
    transposed: bool = False
    interleaved: bool = False


@dataclass
class ExpertLayout:
    """The experts of all layers on one rank; `size` values of a slot, from `start` on.

    experts   with adapters on this rank, in their order; num_experts   of the model
    """

    experts: Sequence[int]
    num_experts: int
    rank: int
    start: int
    size: int = 0
    products: list[ExpertProduct] = field(default_factory=list)
    _singles: dict[str, tuple[ExpertProduct, int, int]] = field(default_factory=dict)
    _layers: dict[str, _Layer] = field(default_factory=dict)

    def add(self, entries: Sequence[WeightEntry], module_of: ModuleOf, align: Align) -> None:
        """Reserve the products of one layer with these entries of its experts."""
        first = entries[0]
        up = next(it for it in entries if it.parameter.endswith(".w13_e2ID"))
        down = next(it for it in entries if it.parameter.endswith(".w2_eDI"))
        width, hidden = down.columns, up.columns
        block = first.parameter.rsplit(".", 1)[0]
        layer = _Layer(
            self._product(block, 2, 2 * width, hidden, align),
            self._product(block, 1, hidden, width, align),
            up.transposed,
            up.interleaved,
        )
        fused = first.name if first.stacked else first.fused
        self._layers[module_of(fused).rsplit(".", 1)[0]] = layer
        for entry in entries:
            if not entry.stacked and entry.expert is not None:
                part = UP if entry.rows is not None and entry.rows[0] else GATE
                product = layer.down if entry.rows is None else layer.up
                name = module_of(entry.name.removesuffix(".weight"))
                self._singles[name] = product, part, entry.expert

    def _product(
        self, block: str, parts: int, rows: int, columns: int, align: Align
    ) -> ExpertProduct:
        count = len(self.experts)
        a = self.start + self.size
        b = align(a + count * parts * self.rank * columns)
        self.size = align(b + count * rows * self.rank) - self.start
        made = ExpertProduct(block, parts, count, rows, columns, a, b)
        self.products.append(made)
        return made

    @cached_property
    def _places(self) -> dict[int, int]:
        return {expert: place for place, expert in enumerate(self.experts)}

    @property
    def modules(self) -> Iterator[str]:
        """Names of all modules, each expert's and the fused ones."""
        yield from self._singles
        yield from self._layers

    @property
    def single_shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each expert's modules, by name."""
        return {
            module: (product.rows // product.num_parts, product.columns)
            for module, (product, _, _) in self._singles.items()
        }

    def place(self, module: str, name: str, pair: LoraPair) -> list[ExpertFill] | None:
        """Return what a pair fills on this rank; None: it belongs to no expert. Raises AdapterError."""
        if module in self._singles:
            return self._single(module, name, pair)
        bare = module
        while bare.endswith(WRAPPED):
            bare = bare.removesuffix(WRAPPED)
        layer = self._layers.get(bare)
        return None if layer is None else list(self._fused(layer, name, pair))

    def _single(self, module: str, name: str, pair: LoraPair) -> list[ExpertFill]:
        product, part, expert = self._singles[module]
        outputs = product.rows // product.num_parts
        if (pair.inputs, pair.outputs) != (product.columns, outputs):
            raise AdapterError(
                f"{name}: the adapter has {pair.inputs} inputs and {pair.outputs} outputs, the model "
                f"{product.columns} and {outputs}: it was made for another model"
            )
        pair.check_declared(name)
        self._check_rank(name, pair.rank)
        place = self._places.get(expert)
        return [] if place is None else [SingleFill(product, part, place)]

    def _fused(self, layer: _Layer, name: str, pair: LoraPair) -> Iterator[ExpertFill]:
        product = self._product_of(layer, name, pair)
        if pair.rank % self.num_experts:
            raise AdapterError(
                f"{name}: lora_A has {pair.rank} rows; expected a multiple of the {self.num_experts} experts"
            )
        self._check_rank(name, pair.rank // self.num_experts)
        swapped = (pair.inputs, pair.outputs) != (product.columns, product.rows)
        if product.rows == product.columns and not layer.transposed:
            raise AdapterError(
                f"{name}: versions of PEFT order lora_A and lora_B of this parameter differently, and its "
                f"{product.rows} rows and columns do not show which one it was; save the experts one by one"
            )
        half = product.rows // 2
        parts = [slice(None)] if product.num_parts == 1 else [slice(half), slice(half, None)]
        if layer.interleaved and product.num_parts == 2:
            parts = [slice(0, None, 2), slice(1, None, 2)]
        for places, experts in runs(list(enumerate(self.experts))):
            for part, outputs in enumerate(parts):
                which = places, experts, self.num_experts
                yield FusedFill(product, part, *which, outputs, swapped)

    def _product_of(self, layer: _Layer, name: str, pair: LoraPair) -> ExpertProduct:
        """Return the product of a fused pair, which its shapes decide."""
        sizes = {pair.inputs, pair.outputs}
        for product in (layer.up, layer.down):
            if sizes == {product.rows, product.columns}:
                return product
        raise AdapterError(
            f"{name}: the adapter has {pair.inputs} inputs and {pair.outputs} outputs, the experts' parameters "
            f"{layer.up.columns} and {layer.up.rows}, {layer.down.columns} and {layer.down.rows}: it was made for "
            "another model"
        )

    def _check_rank(self, name: str, rank: int) -> None:
        if rank > self.rank:
            raise AdapterError(
                f"{name}: rank {rank} is above lora.max_rank ({self.rank}); set lora.max_rank: {rank}"
            )
