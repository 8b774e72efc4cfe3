"""Finds the modules that a checkpoint stores in another form than its `quantization_config` gives. Reads no tensor.

Tools leave modules in 16 bits without a rule: GPTQModel by their architecture, others the head for multi-token
prediction, which transformers does not load. AutoAWQ and transformers quantise routers and gates, others the projection
of a head's inputs, without a field for it. The tensors of the files decide.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from workers.specs.four_bit import DiskKind, FourBitForm
from workers.specs.quantization import Quantization
from workers.specs.weight_map import Scaling, WeightEntry, WeightKind
from workers.weights.checkpoint_files import CheckpointError, has_scales
from workers.weights.files import FLOATS, StoredTensor

# Matrices that models never hold quantised, and that releases keep in 16 bits.
KEPT = (WeightKind.ROUTER, WeightKind.GATE, WeightKind.DRAFT_PROJECTION)
# Names of safetensors of dtypes that quantised checkpoints alone have.
QUANTISED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8", "I32", "U32"})


def check_unquantised(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError for quantised tensors with scales in a checkpoint without a `quantization_config`."""
    packed = next((name for name, tensor in stored.items() if tensor.dtype in QUANTISED), None)
    if packed is not None and has_scales(stored):
        raise CheckpointError(
            f"{folder} is quantised ({packed} is {stored[packed].dtype}), but its config.json has no "
            "quantization_config"
        )


def changed_forms(
    entries: Iterable[WeightEntry],
    stored: Mapping[str, StoredTensor],
    quantization: Quantization | None,
) -> dict[str, WeightEntry]:
    """Return the entries that are stored in another form than the weight map gives, by their keys, in that form."""
    found = {}
    for entry in entries:
        if entry.four_bit is not None or entry.fp8 is not None:
            if _is_plain(entry, stored):
                found[entry.key] = entry._replace(four_bit=None, fp8=None)
        elif quantization is not None and entry.kind in KEPT and len(entry.shape) == 2:
            quantised = _quantised(entry, quantization)
            if quantised is not None and _holds(quantised, stored):
                found[entry.key] = quantised
    return found


def _is_plain(entry: WeightEntry, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether the matrix is stored in a floating dtype of 16 bits or more, and nothing of it quantised."""
    if entry.name not in stored or stored[entry.name].dtype not in FLOATS:
        return False
    plain = not any(name in stored for name in entry.disk if name != entry.name)
    if plain and entry.stacked:
        raise CheckpointError(
            f"{entry.name} is {stored[entry.name].dtype}, but quantization_config in config.json packs the experts in "
            "four bits; remove quantization_config, which tools forget that write weights in 16 bits"
        )
    return plain


def _quantised(entry: WeightEntry, quantization: Quantization) -> WeightEntry | None:
    """Return the entry in the form that the rules give to its name, None if they leave it out."""
    form = quantization.form(entry.name)
    if isinstance(form, FourBitForm):
        return entry._replace(four_bit=form) if form.problem(*entry.shape) is None else None
    if form is None or (form.scaling == Scaling.BLOCK and entry.shape[0] == 1):
        return None  # transformers leaves the scales of blocks unset for a matrix of one row
    return entry._replace(fp8=form)


def _holds(entry: WeightEntry, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether all tensors of the quantised matrix are stored, in FP8 where they are to be."""
    return all(
        name in stored and (tensor.kind != DiskKind.FP8 or stored[name].dtype == DiskKind.FP8)
        for name, tensor in entry.disk.items()
    )
