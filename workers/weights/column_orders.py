"""Checks that matrices which one product joins order their input columns alike (GPTQ's desc_act)."""

from collections.abc import Iterable, Mapping

from workers.specs.four_bit import FourBitForm
from workers.specs.weight_map import WeightEntry
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.files import StoredTensor


def check_column_orders(stored: Mapping[str, StoredTensor], entries: Iterable[WeightEntry]) -> None:
    """Raise CheckpointError for two ordered matrices of one parameter and expert with different orders."""
    first: dict[tuple[str, int | None], tuple[str, bytes]] = {}
    for entry in entries:
        form = entry.four_bit
        if form is None or not form.format.ordered:
            continue
        order = _read(stored[_order_name(entry, form)])
        name, found = first.setdefault((entry.parameter, entry.expert), (entry.name, order))
        if found != order:
            raise CheckpointError(
                f"{name} and {entry.name} order their columns differently, but one product takes both; set "
                "kernels.grouped_gemm to a backend that holds weights in model.dtype"
            )


def _order_name(entry: WeightEntry, form: FourBitForm) -> str:
    names = form.tensors(entry.name, *entry.shape)
    return next(name for name in names if name.endswith("g_idx"))


def _read(stored: StoredTensor) -> bytes:
    try:
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            return file.read(stored.num_bytes)
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be read: {error}") from error
