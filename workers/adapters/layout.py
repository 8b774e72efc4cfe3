"""Where the matrices of an adapter lie in a slot: one flat array of the model's dtype, for every product with adapters.

A product of the model joins modules of the checkpoint, as q, k and v. Each module is a part with an A of its own; the
rows of B lie as the rows of the weight do, in the order that the weight map gives them. Needs the weight map alone.

N outputs and K inputs of a product, r the largest rank, P parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from workers.adapters.expert_layout import Cell, ExpertFill, ExpertLayout, FusedPair, fused_name
from workers.adapters.peft_config import Declared
from workers.adapters.peft_folder import LoraPair, PeftFolder, named
from workers.config import RankConfig
from workers.lora_config import AdapterError, LoraConfig
from workers.specs.model import ModelConfig, weight_map
from workers.specs.weight_map import QUANTISABLE, WeightEntry, WeightKind, mapped_name
from workers.weights.tensors import DENSE, DTYPE_BYTES

ALIGNMENT = 64  # values, so that every matrix begins at a multiple of 128 bytes
LAYERS = "layers."
# What stands before `layers.` in names of modules: of causal models, of base models, and of those with other towers.
ROOTS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
EXPERTS = "experts"  # of lora.targets
EMBEDDINGS, HEAD = "embeddings", "lm_head"
OUTSIDE_LAYERS = ("embed_tokens", HEAD)
# Parameters of all experts in transformers. PEFT gives the pair of one parameter the name of its module, with
# WRAPPED for each further parameter of the module.
FUSED = ("gate_up_proj", "down_proj")
WRAPPED = ".base_layer"
# Weights with adapters that no other product of DENSE has.
UNQUANTISED = ("attention.ba.weight", "attention.kv_up.weight")


@dataclass(frozen=True)
class Product:
    """One product of the model: `parameter` is the path of its weight, `modules` name its parts.

    is_table   an embedding: A is [K, r], a row for each token
    entries    tensors of the weight, each with the part that it belongs to
    rows, columns   N and K
    a, b       where A [P * r, K] and B [N, r] begin in a slot
    """

    parameter: str
    modules: tuple[str, ...]
    entries: tuple[tuple[WeightEntry, int], ...]
    rows: int
    columns: int
    a: int
    b: int
    is_table: bool = False

    @property
    def linear(self) -> str:
        """The path of the layer that multiplies."""
        return self.parameter.removesuffix(".weight")

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """(first row, end row, part) of B, in rising order."""
        blocks = ((*(entry.rows or (0, self.rows)), part) for entry, part in self.entries)
        return tuple(sorted(blocks))


class PartFill(NamedTuple):
    """One part of a product, which a pair fills."""

    product: Product
    part: int
    factor: float

    @property
    def cells(self) -> Iterator[Cell]:
        yield self.product.a, self.part, 0


Fill = PartFill | ExpertFill
Placed = Mapping[str, Sequence[Fill]]
"""What each pair of an adapter fills on a rank, by the pair's name."""


@dataclass(frozen=True)
class AdapterLayout:
    """All products with adapters; `size` values of a slot."""

    products: tuple[Product, ...]
    rank: int
    size: int
    config: ModelConfig
    targets: tuple[str, ...]
    experts: ExpertLayout

    @classmethod
    def of(
        cls, config: ModelConfig, lora: LoraConfig, experts: Sequence[int] = ()
    ) -> "AdapterLayout":
        """Return the layout of a model's adapters on a rank with these experts."""
        found: dict[str, list[WeightEntry]] = {}
        of_experts: dict[str, list[WeightEntry]] = {}
        for entry in _entries(config):
            target = _target(entry, config)
            if target == EXPERTS and target in lora.targets:
                of_experts.setdefault(entry.parameter.rsplit(".", 1)[0], []).append(entry)
            elif target in lora.targets:
                found.setdefault(entry.parameter, []).append(entry)
        products, end = [], 0
        for parameter, entries in found.items():
            modules = tuple(dict.fromkeys(module_of(entry) for entry in entries))
            placed = tuple((entry, modules.index(module_of(entry))) for entry in entries)
            rows, columns = sum(entry.num_rows for entry in entries), entries[0].columns
            is_table = entries[0].kind == WeightKind.EMBEDDING
            if is_table:
                rows, columns = columns, rows
            a = end
            b = _aligned(a + len(modules) * lora.max_rank * columns)
            end = _aligned(b + rows * lora.max_rank)
            products.append(Product(parameter, modules, placed, rows, columns, a, b, is_table))
        routed = ExpertLayout(experts, config.num_experts, lora.max_rank, end)
        for entries in of_experts.values():
            routed.add(entries, _from_layers, _aligned)
        size = end + routed.size
        return cls(tuple(products), lora.max_rank, size, config, tuple(lora.targets), routed)

    @cached_property
    def parts(self) -> Mapping[str, tuple[Product, int]]:
        """Product and part of each module, by its name from `layers.` on."""
        return {
            module: (product, part)
            for product in self.products
            for part, module in enumerate(product.modules)
        }

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of every module that adapters may change, by its name from `layers.` on."""
        found = {module: _shape(*place) for module, place in self.parts.items()}
        return found | self.experts.single_shapes

    @property
    def is_empty(self) -> bool:
        """Whether the model has nothing that adapters may change."""
        return not self.products and not self.experts.products

    def place(self, folder: PeftFolder) -> Placed:
        """Return where each pair belongs. Raises AdapterError for pairs that fit nowhere, or in one place."""
        placed: dict[str, Sequence[Fill]] = {}
        fused: dict[str, FusedPair] = {}
        unknown = []
        self._check_tables(folder)
        for name, pair in folder.pairs.items():
            module, declared = self._module(name), folder.config.declared(name)
            if module in self.parts:
                placed[name] = [self._part(module, pair, declared)]
            elif module in self.experts.singles:
                placed[name] = self.experts.single(module, pair, declared)
            elif targets := self._fused_targets(name):
                fused[name] = self.experts.fused_pair(targets, pair, folder.config)
            else:
                unknown.append(name)
        if unknown:
            raise AdapterError(self._unknown(unknown))
        placed |= self.experts.all_experts(fused)
        _check_owners(placed)
        return placed

    def _check_tables(self, folder: PeftFolder) -> None:
        table = (self.config.vocab_size, self.config.hidden_size)
        for name, shape in folder.bases.items():
            if shape != table:
                raise AdapterError(
                    f"{name} of the adapter's file is {list(shape)}, the model has {list(table)}: adapters "
                    "with another vocabulary are not supported"
                )

    def _part(self, module: str, pair: LoraPair, declared: Declared) -> PartFill:
        product, part = self.parts[module]
        pair.check_shape(declared.target, *_shape(product, part))
        declared.check(pair.rank, self.rank)
        return PartFill(product, part, declared.factor)

    def _fused_targets(self, name: str) -> dict[str, str]:
        """Return the names for PEFT of the parameters in the layout that a pair may belong to, see `_parameters`."""
        found = self._parameters(name).items()
        return {name: target for name, target in found if name in self.experts.fused}

    def _module(self, name: str) -> str:
        """Return the name of a module from `layers.` on, as the weight map has it; as it is for other modules."""
        root, _, last = name.rpartition(".")
        if last in OUTSIDE_LAYERS and f"{root}." in (".", *ROOTS):
            return last
        return self._tensor(f"{name}.weight").removesuffix(".weight")

    def _parameters(self, name: str) -> dict[str, str]:
        """Return the names that parameters of all experts of a module have for PEFT, by those in the weight map."""
        while name.endswith(WRAPPED):
            name = name.removesuffix(WRAPPED)
        targets = (f"{name}.{parameter}" for parameter in FUSED)
        return {self._tensor(target): target for target in targets}

    def _tensor(self, name: str) -> str:
        """Return the name of a tensor as `_module` returns that of a module."""
        name = mapped_name(name, self.config.renamed)
        root, found, rest = name.partition(LAYERS)
        return f"{found}{rest}" if found and root in ROOTS else name

    def _unknown(self, names: list[str]) -> str:
        """Explain why there is no place for these modules."""
        in_transformers = [(mapped, part) for part, mapped in self.config.renamed]
        fused = (mapped_name(name, in_transformers) for name in self.experts.fused)
        known = {_name(module) for module in (*self.parts, *self.experts.singles, *fused)}
        text = f"no place for {named(names)}; adapters may change {', '.join(sorted(known))}"
        everything = {known: it for it in _entries(self.config) for known in _names_of(it)}
        wanted = (it for name in names for it in (self._module(name), *self._parameters(name)))
        entries = [everything[it] for it in wanted if it in everything]
        missing = {_target(entry, self.config) for entry in entries} - {None, *self.targets}
        if missing:
            text += f"; add {', '.join(sorted(map(str, missing)))} to lora.targets"
        head = () if self.config.mtp is None else map(module_of, weight_map(self.config.mtp))
        of_head = {self._module(name) for name in names} & {*head}
        if of_head:
            text += f"; {named(sorted(of_head))} is of the head that drafts, which adapters do not change"
        return text


def _check_owners(placed: Placed) -> None:
    owners: dict[Cell, str] = {}
    for name, fills in placed.items():
        for cell in (cell for fill in fills for cell in fill.cells):
            if (owner := owners.setdefault(cell, name)) != name:
                raise AdapterError(f"{owner} and {name} are adapters of one product")


def _shape(product: Product, part: int) -> tuple[int, int]:
    """Return outputs and inputs of the module of one part."""
    entry = next(entry for entry, its_part in product.entries if its_part == part)
    if product.is_table:
        return product.rows, product.columns
    return entry.shape[1 if entry.transposed else 0], product.columns


def slots_bytes(model: ModelConfig, ranks: RankConfig, rank: int) -> int:
    """Return the bytes of the slots of adapters on a rank; 0 without LoRA."""
    if not ranks.lora.max_loras:
        return 0
    dtype = ranks.model.dtype
    assert dtype != "auto", "a RankConfig has the checkpoint's dtype in its place"
    layout = AdapterLayout.of(model, ranks.lora, adapter_experts(model, ranks, rank))
    return ranks.lora.max_loras * layout.size * DTYPE_BYTES[dtype]


def adapter_experts(model: ModelConfig, ranks: RankConfig, rank: int) -> Sequence[int]:
    """Return the experts of which a rank holds the adapters: its own, or all where a map has the places of experts.

    So adapters stay where they are while experts move.
    """
    if ranks.experts.mapped:
        return range(model.num_experts)
    return ranks.dims.expert_map(model.num_experts).experts_of(rank)


def module_of(entry: WeightEntry) -> str:
    """Return the name of an entry's module from `layers.` on."""
    return _from_layers(entry.name.removesuffix(".weight"))


def _from_layers(name: str) -> str:
    return name[name.find(LAYERS) :] if LAYERS in name else name.rpartition(".")[2]


def _entries(config: ModelConfig) -> Iterator[WeightEntry]:
    """Yield the weight map, with the head that is tied to the embedding: adapters of it are its own."""
    yield from weight_map(config)
    if config.has_logits and config.tie_word_embeddings:
        table = (config.vocab_size, config.hidden_size)
        yield WeightEntry(f"{HEAD}.weight", table, f"{HEAD}.weight", WeightKind.HEAD)


def _names_of(entry: WeightEntry) -> Iterator[str]:
    """Yield the names of an entry's module, and of the parameter of all experts that it belongs to."""
    yield module_of(entry)
    if fused := fused_name(entry):
        yield _from_layers(fused)


def _target(entry: WeightEntry, config: ModelConfig) -> str | None:
    """Return the member of lora.targets that an entry belongs to; None: it takes no adapter."""
    if entry.kind == WeightKind.EMBEDDING:
        return EMBEDDINGS
    if entry.kind == WeightKind.HEAD:  # scores of a pooling model read single rows of the head
        return EMBEDDINGS if module_of(entry) == HEAD and config.pooling is None else None
    if entry.expert is not None:
        return EXPERTS if entry.kind in QUANTISABLE else None
    if not entry.parameter.endswith((*DENSE, *UNQUANTISED)):
        return None
    return "attention" if ".attention." in entry.parameter else "mlp"


def _name(module: str) -> str:
    """Return a module's name without the numbers of its layer and its expert."""
    parts = module.split(".")
    return ".".join("N" if part.isdigit() else part for part in parts[2:] or parts)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
