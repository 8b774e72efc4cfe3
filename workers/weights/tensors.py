"""Sums and selections over a model's weight map: what a rank holds, in how many bytes. Needs no torch."""

from collections import Counter, defaultdict
from collections.abc import Container
from functools import lru_cache

from kernels.four_bit_format import FourBitFormat
from kernels.routing.expert_map import ExpertMap
from workers.specs.model import DtypeName, ModelConfig, weight_map
from workers.specs.weight_map import FP8_BLOCK, FP8_SCALE_BYTES, QUANTISABLE, Scaling, WeightEntry

# Weights that `LayerBuilder.linear` allocates; all others keep the model's dtype.
DENSE = (
    *("attention.qkv.weight", "attention.o.weight"),
    *("attention.qkvz.weight", "attention.out.weight"),
    *("attention.down.weight", "attention.q_up.weight"),
    *("mlp.gate_up.weight", "mlp.down.weight"),
    *("mlp.shared.gate_up.weight", "mlp.shared.down.weight"),
)
FP8_ROWS = 64  # a dense product in FP8 has a multiple of these outputs, and of FP8_BLOCK inputs
FOUR_BIT_TILE = 64  # as in kernels.four_bit, which needs torch
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


def four_bit_experts(config: ModelConfig) -> FourBitFormat | None:
    """Return the format of the experts, None unless all of them are packed in four bits in one format."""
    forms = {entry.four_bit for entry in weight_map(config) if _is_expert_matrix(entry)}
    formats = {None if form is None else form.format for form in forms}
    return formats.pop() if len(formats) == 1 else None


@lru_cache(maxsize=4)  # a command reads the model several times
def four_bit_problem(config: ModelConfig) -> str | None:
    """Return a complaint about the first matrix that its packing cannot hold."""
    for entry in weight_map(config):
        problem = entry.four_bit and entry.four_bit.problem(*entry.shape)
        if problem:
            return f"quantization_config does not fit {entry.name}: {problem}"
    return None


def _is_expert_matrix(entry: WeightEntry) -> bool:
    return entry.expert is not None and entry.kind in QUANTISABLE


def experts_with_row_scales(config: ModelConfig) -> bool:
    """Return whether the checkpoint has experts in FP8 with one scale a row."""
    experts = (entry.fp8 for entry in weight_map(config) if entry.expert is not None)
    return any(fp8 is not None and fp8.scaling == Scaling.CHANNEL for fp8 in experts)


def fp8_parameters(config: ModelConfig) -> frozenset[str]:
    """Return the parameters of dense products that FP8 blocks hold exactly as the checkpoint stores them."""
    return frozenset(fp8_shapes(config))


def fp8_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return rows and columns of each of `fp8_parameters`."""
    return {
        name: (sum(entry.num_rows for entry in entries), entries[0].columns)
        for name, entries in _dense(config).items()
        if _fits_blocks(entries)
    }


def fp8_not_kept(config: ModelConfig) -> list[str]:
    """Return the parameters of dense products that no FP8 blocks hold, though tensors of them are in FP8."""
    return [
        name
        for name, entries in _dense(config).items()
        if any(entry.fp8 is not None for entry in entries) and not _fits_blocks(entries)
    ]


def four_bit_parameters(config: ModelConfig) -> dict[str, FourBitFormat]:
    """Return the parameters of dense products that stay in four bits, to their formats."""
    found = {}
    for name, entries in _dense(config).items():
        formats = {None if e.four_bit is None else e.four_bit.format for e in entries}
        form = formats.pop()
        if form is not None and not formats and all(map(_keeps_tiles, entries)):
            found[name] = form
    return found


def _keeps_tiles(entry: WeightEntry) -> bool:
    """Return whether the entry's rows in the parameter, and its columns, are whole tiles."""
    sides = (*(entry.rows or (entry.num_rows,)), entry.columns)
    return not any(side % FOUR_BIT_TILE for side in sides)


def _dense(config: ModelConfig) -> dict[str, list[WeightEntry]]:
    """Return the tensors of each parameter of DENSE, for a checkpoint with weights in FP8 or in four bits."""
    tensors: dict[str, list[WeightEntry]] = {}
    if config.quantization is not None:
        for entry in weight_map(config):
            if entry.expert is None and entry.parameter.endswith(DENSE):
                tensors.setdefault(entry.parameter, []).append(entry)
    return tensors


def _fits_blocks(entries: list[WeightEntry]) -> bool:
    """Return whether the tensors of a parameter are in FP8, begin at its blocks, and keep their rows in blocks."""
    rows = sum(entry.num_rows for entry in entries)
    return (
        rows % FP8_ROWS == 0
        and entries[0].columns % FP8_BLOCK == 0
        and all(
            entry.fp8 is not None
            and entry.fp8.scaling != Scaling.CHANNEL
            and (entry.rows is None or entry.rows[0] % FP8_BLOCK == 0)
            and (entry.rows is None or entry.rows[1] % FP8_BLOCK == 0 or entry.rows[1] == rows)
            and entry.keeps_blocks
            for entry in entries
        )
    )


def rank_weights(
    config: ModelConfig,
    expert_map: ExpertMap,
    rank: int,
    *,
    experts: Container[tuple[int, int]] | None = None,
) -> list[WeightEntry]:
    """Return the tensors of one rank: those of its experts, and every tensor that belongs to no expert.

    experts   return the tensors of these (layer, expert) alone, as far as the rank holds them
    """
    of_layers: dict[int, frozenset[int]] = {}

    def is_local(entry: WeightEntry) -> bool:
        layer = entry.layer
        if layer not in of_layers:
            of_layers[layer] = frozenset(expert_map.experts_of(rank, layer))
        if entry.expert not in of_layers[layer]:
            return False
        return experts is None or (layer, entry.expert) in experts

    return [
        entry
        for entry in weight_map(config)
        if (experts is None if entry.expert is None else is_local(entry))
    ]


def draft_head_bytes(config: ModelConfig, *, fp8_dense: bool) -> int:
    """Return the bytes of the output head's copy in FP8, by which a head for multi-token prediction drafts; 0: none.

    A model with dense weights in FP8 has one, where the product takes the head's shape. Drafts are verified, so they
    need not be those of the head itself, and a draft of one row takes as long as it takes to read the head.
    """
    rows, columns = config.vocab_size, config.hidden_size
    fits = rows % FP8_ROWS == 0 and columns % FP8_BLOCK == 0
    if not (fp8_dense and fits and fp8_parameters(config)):
        return 0
    blocks = -(-rows // FP8_BLOCK) * (columns // FP8_BLOCK)
    return rows * columns + FP8_SCALE_BYTES * blocks


def rank_weight_bytes(
    config: ModelConfig,
    expert_map: ExpertMap,
    rank: int,
    dtype: DtypeName,
    *,
    fp8_experts: bool = False,
    fp8_dense: bool = False,
    in_four_bits: bool = False,
    experts: Container[tuple[int, int]] | None = None,
) -> int:
    """Return the bytes of one rank's weights in memory (norms, a few KiB, may take twice as much).

    fp8_experts   the experts' product computes with FP8 weights
    fp8_dense     so do dense products with weights that the checkpoint stores in FP8
    in_four_bits  the experts' product computes with weights in four bits, and so do `four_bit_parameters`; all else is
                  held in `dtype`
    experts       count the weights of these (layer, expert) alone
    """
    of_dense, of_experts = _owned_bytes(config, dtype, fp8_experts, fp8_dense, in_four_bits)
    total = of_dense if experts is None else 0
    for layer, of_layer in of_experts.items():
        for expert in expert_map.experts_of(rank, layer):
            if experts is None or (layer, expert) in experts:
                total += of_layer[expert]
    return total


@lru_cache(maxsize=4)  # all ranks of a check have one form
def _owned_bytes(
    config: ModelConfig, dtype: DtypeName, fp8_experts: bool, fp8_dense: bool, in_four_bits: bool
) -> tuple[int, dict[int, Counter[int]]]:
    """Return the bytes of the tensors of no expert, and those of the tensors of each expert in each layer."""
    width, dense = DTYPE_BYTES[dtype], fp8_parameters(config) if fp8_dense else ()
    packed = four_bit_parameters(config) if in_four_bits else {}

    def num_bytes(entry: WeightEntry) -> int:
        in_experts = in_four_bits and entry.expert is not None
        if entry.four_bit is not None and (in_experts or entry.parameter in packed):
            return entry.four_bit_bytes
        in_fp8 = entry.parameter in dense if entry.expert is None else fp8_experts
        return entry.fp8_bytes if in_fp8 else width * entry.size

    of_dense, of_experts = 0, defaultdict[int, Counter[int]](Counter)
    for entry in weight_map(config):
        if entry.expert is None:
            of_dense += num_bytes(entry)
        else:
            of_experts[entry.layer][entry.expert] += num_bytes(entry)
    return of_dense, of_experts
