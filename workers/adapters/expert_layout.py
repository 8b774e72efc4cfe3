"""Where the matrices of routed experts lie in a slot of adapters, and which part of an adapter's tensors they are.

PEFT has two forms. Experts one by one: a pair of matrices for gate, up and down of each. Fused: one pair for a
parameter that holds all experts, A [E * r, K] with the ranks of an expert side by side, and B [N, r * E] with the
experts of a rank side by side; gate and up are one parameter then. Some versions of PEFT and transformers take the rows
of such parameters for inputs, so that A and B of all pairs of a file change places. Needs the weight map alone.

E experts of the model, e of them with adapters on this rank, P parts, r the largest rank, N outputs and K inputs of a
product.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from kernels.routing.expert_map import runs
from workers.adapters.peft_config import Declared, PeftConfig
from workers.adapters.peft_folder import LoraPair
from workers.lora_config import AdapterError
from workers.specs.weight_map import WeightEntry

GATE, UP = 0, 1
NameOf = Callable[[str], str]
Align = Callable[[int], int]
Cell = tuple[int, int, int]
"""Where the A of a product begins in a slot, a part of the product, and the place of an expert."""


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
    factor: float

    @property
    def cells(self) -> Iterator[Cell]:
        yield self.product.a, self.part, self.place


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
    factor: float

    @property
    def cells(self) -> Iterator[Cell]:
        for place in range(self.places.start, self.places.stop):
            yield self.product.a, self.part, place

    def matrices(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [e, rank, K] and B [e, N / P, rank] of the tensors of the pair."""
        rank = len(a) // self.num_experts
        a_erK = a.view(self.num_experts, rank, -1)[self.experts]
        b_eNr = b.view(len(b), rank, self.num_experts)[:, :, self.experts].permute(2, 0, 1)
        if self.swapped:
            a_erK, b_eNr = b_eNr.transpose(1, 2), a_erK.transpose(1, 2)
        return a_erK, b_eNr[:, self.outputs]


ExpertFill = SingleFill | FusedFill


class FusedParameter(NamedTuple):
    """The parameter of all experts for one product; `interleaved`: rows of gate and of up alternate."""

    product: ExpertProduct
    interleaved: bool


class FusedPair(NamedTuple):
    """A pair of all experts, and the parameter that it belongs to."""

    parameter: FusedParameter
    pair: LoraPair
    declared: Declared

    @property
    def swapped(self) -> bool | None:
        """Whether A and B have changed places; None: the shapes do not show it, as rows and columns are equal."""
        product = self.parameter.product
        if product.rows == product.columns:
            return None
        return (self.pair.inputs, self.pair.outputs) != (product.columns, product.rows)


def fused_name(entry: WeightEntry) -> str:
    """Return the name of the parameter that holds an entry's values of all experts; "" if there is none."""
    return entry.name if entry.stacked else entry.fused


@dataclass
class ExpertLayout:
    """The experts of all layers on one rank; `size` values of a slot, from `start` on.

    experts   with adapters on this rank, in their order; num_experts   of the model
    fused     parameters of all experts, by name in the weight map from `layers.` on
    singles   product, part and expert of each expert's modules, by name from `layers.` on
    """

    experts: Sequence[int]
    num_experts: int
    rank: int
    start: int
    size: int = 0
    products: list[ExpertProduct] = field(default_factory=list)
    fused: dict[str, FusedParameter] = field(default_factory=dict)
    singles: dict[str, tuple[ExpertProduct, int, int]] = field(default_factory=dict)

    def add(self, entries: Sequence[WeightEntry], from_layers: NameOf, align: Align) -> None:
        """Reserve the products of one layer with these entries of its experts."""
        up = next(it for it in entries if it.parameter.endswith(".w13_e2ID"))
        down = next(it for it in entries if it.parameter.endswith(".w2_eDI"))
        width, hidden = down.columns, up.columns
        block = up.parameter.rsplit(".", 1)[0]
        up_product = self._product(block, 2, 2 * width, hidden, align)
        down_product = self._product(block, 1, hidden, width, align)
        for entry, product in ((up, up_product), (down, down_product)):
            parameter = FusedParameter(product, entry.interleaved)
            self.fused[from_layers(fused_name(entry))] = parameter
        for entry in entries:
            # Granite has no modules of single experts, and its entries are named as no tensor is
            if not entry.stacked and entry.expert is not None and entry.name.endswith(".weight"):
                part = UP if entry.rows is not None and entry.rows[0] else GATE
                product = down_product if entry.rows is None else up_product
                name = from_layers(entry.name.removesuffix(".weight"))
                self.singles[name] = product, part, entry.expert

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
    def single_shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each expert's modules, by name."""
        return {
            module: (product.rows // product.num_parts, product.columns)
            for module, (product, _, _) in self.singles.items()
        }

    def single(self, module: str, pair: LoraPair, declared: Declared) -> list[ExpertFill]:
        """Return what the pair of a module of `singles` fills on this rank. Raises AdapterError."""
        product, part, expert = self.singles[module]
        pair.check_shape(declared.target, product.rows // product.num_parts, product.columns)
        declared.check(pair.rank, self.rank)
        place = self._places.get(expert)
        return [] if place is None else [SingleFill(product, part, place, declared.factor)]

    def fused_pair(
        self, targets: Mapping[str, str], pair: LoraPair, config: PeftConfig
    ) -> FusedPair:
        """Return a pair with its parameter, which its shapes decide. Raises AdapterError.

        targets   parameters of `fused` that the pair may belong to, and their names for PEFT
        """
        for name, target in targets.items():
            product = self.fused[name].product
            if {pair.inputs, pair.outputs} == {product.rows, product.columns}:
                declared = config.declared(target)
                declared.check(pair.rank, self.rank, self.num_experts)
                return FusedPair(self.fused[name], pair, declared)
        sizes = [(target, self.fused[name].product) for name, target in targets.items()]
        expected = ", ".join(f"{name} {it.columns} and {it.rows}" for name, it in sizes)
        raise AdapterError(
            f"{pair.a}: the adapter has {pair.inputs} inputs and {pair.outputs} outputs, the model's parameters "
            f"{expected}: it was made for another model"
        )

    def all_experts(self, pairs: Mapping[str, FusedPair]) -> dict[str, list[ExpertFill]]:
        """Return what all pairs of all experts of a file fill on this rank. Raises AdapterError."""
        orders = {it.swapped for it in pairs.values()} - {None}
        order = orders.pop() if len(orders) == 1 else None
        return {name: list(self._fused(it, order)) for name, it in pairs.items()}

    def _fused(self, fused: FusedPair, order: bool | None) -> Iterator[ExpertFill]:
        """Yield what a pair fills; `order`: whether A and B of other pairs of the file have changed places."""
        (product, interleaved), (target, _, factor) = fused.parameter, fused.declared
        swapped = order if fused.swapped is None else fused.swapped
        if swapped is None:
            raise AdapterError(
                f"{target}: versions of PEFT order lora_A and lora_B of this parameter differently, and neither its "
                f"{product.rows} rows and columns nor another parameter of all experts in the file shows the order; "
                "adapt gate_up_proj and down_proj both"
            )
        half = product.rows // 2
        parts = [slice(None)] if product.num_parts == 1 else [slice(half), slice(half, None)]
        if interleaved and product.num_parts == 2:
            parts = [slice(0, None, 2), slice(1, None, 2)]
        for places, experts in runs(list(enumerate(self.experts))):
            for part, outputs in enumerate(parts):
                which = places, experts, self.num_experts
                yield FusedFill(product, part, *which, outputs, swapped, factor)
