"""Finds the modules that a checkpoint stores in another form than its `quantization_config` gives. Reads no tensor.

GPTQModel leaves modules in 16 bits by their architecture, and AutoAWQ and transformers quantise routers and gates,
without a field for it. The tensors of the files decide.
"""

from collections.abc import Iterable, Mapping

from workers.specs.four_bit import DiskKind, FourBitForm, Packing
from workers.specs.quantization import Quantization
from workers.specs.weight_map import Scaling, WeightEntry, WeightKind
from workers.weights.files import FLOATS, StoredTensor

OF_MODULES = (Packing.GPTQ, Packing.GPTQ_V2, Packing.AWQ)  # the tensors' names differ from .weight
# Matrices that models never hold quantised, and that releases keep in 16 bits.
KEPT = (WeightKind.ROUTER, WeightKind.GATE)


def changed_forms(
    entries: Iterable[WeightEntry],
    stored: Mapping[str, StoredTensor],
    quantization: Quantization | None,
) -> dict[str, WeightEntry]:
    """Return the entries that are stored in another form than the weight map gives, by their keys, in that form."""
    if quantization is None:
        return {}
    found = {}
    for entry in entries:
        if entry.four_bit is not None:
            if _is_plain(entry, stored):
                found[entry.key] = entry._replace(four_bit=None)
        elif entry.kind in KEPT and len(entry.shape) == 2:
            quantised = _quantised(entry, quantization)
            if quantised is not None and _holds(quantised, stored):
                found[entry.key] = quantised
    return found


def _is_plain(entry: WeightEntry, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether the matrix is stored in a floating dtype of 16 bits or more, and nothing of it quantised."""
    if entry.name not in stored or stored[entry.name].dtype not in FLOATS:
        return False
    return not any(name in stored for name in entry.disk if name != entry.name)


def _quantised(entry: WeightEntry, quantization: Quantization) -> WeightEntry | None:
    """Return the entry in the form that the rules give to its name, None if they leave it out."""
    form = quantization.form(entry.name)
    if isinstance(form, FourBitForm):
        fits = form.packing in OF_MODULES and form.problem(*entry.shape) is None
        return entry._replace(four_bit=form) if fits else None
    # transformers leaves the scales of blocks unset for a matrix of one row
    of_tensor = form is not None and form.scaling == Scaling.TENSOR
    return entry._replace(fp8=form) if of_tensor else None


def _holds(entry: WeightEntry, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether all tensors of the quantised matrix are stored, in FP8 where they are to be."""
    return all(
        name in stored and (tensor.kind != DiskKind.FP8 or stored[name].dtype == DiskKind.FP8)
        for name, tensor in entry.disk.items()
    )
