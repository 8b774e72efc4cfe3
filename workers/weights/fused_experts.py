"""Splits tensors that hold all experts of a layer into the tensors of the weight map, by their places in the file.

Such a tensor is [E, N, K], or transposed [E, K, N]; the gate and up of an expert share its N rows. Reads no tensor.

E experts, N rows and K columns of an expert's matrix.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from workers.specs.weight_map import WeightEntry
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.files import StoredTensor

Shape = tuple[int, ...]


def split_experts(
    stored: Mapping[str, StoredTensor], entries: Iterable[WeightEntry]
) -> dict[str, StoredTensor]:
    """Return `stored` with the parts of fused tensors, and of their scales, under the names of the map.

    transformers quantises fused tensors, and saves the matrices of each expert beside the scales of all experts.

    Raises CheckpointError for a fused tensor of a wrong shape, or beside tensors of single experts. Where N == K, the
    checkpoint's other fused tensors decide whether it is transposed: gate and up have 2I rows of D columns, down has D
    rows of I columns, so that not both are square.
    """
    parts: dict[str, list[WeightEntry]] = {}
    for entry in entries:
        if entry.fused in stored or _fused_scales(entry) in stored:
            parts.setdefault(entry.fused, []).append(entry)
    if not parts:
        return dict(stored)
    shapes = {name: _shape(of_experts) for name, of_experts in parts.items()}
    transposed = _transposed(stored, {name: shapes[name] for name in shapes if name in stored})
    found = dict(stored)
    for name, of_experts in parts.items():
        fused = {name: [entry.name for entry in of_experts]}
        if scales := _fused_scales(of_experts[0]):
            fused[scales] = [entry.scale_name for entry in of_experts]
        for whole_name, names in fused.items():
            whole = found.pop(whole_name, None)
            if whole is None:
                continue
            for entry, part_name in zip(of_experts, names, strict=True):
                if part_name in stored:
                    raise CheckpointError(f"the checkpoint holds both {whole_name} and {part_name}")
                found[part_name] = _part(whole, entry, shapes[name], whole_name, transposed)
    return found


def _fused_scales(entry: WeightEntry) -> str:
    """Return the name of the scales of all experts, "" if there are none."""
    return entry.fused + entry.fp8.suffix if entry.fused and entry.fp8 is not None else ""


def _shape(of_experts: list[WeightEntry]) -> Shape:
    """Return [E, N, K] of a fused tensor from its parts."""
    num_experts = 1 + max(entry.expert or 0 for entry in of_experts)
    rows = sum(entry.shape[0] for entry in of_experts if entry.expert == 0)
    return num_experts, rows, of_experts[0].shape[1]


def _transposed(stored: Mapping[str, StoredTensor], shapes: Mapping[str, Shape]) -> bool:
    """Return whether fused tensors are [E, K, N]; raise CheckpointError where one has neither shape."""
    votes = set()
    for name, (num_experts, rows, columns) in shapes.items():
        found = stored[name].shape
        if found not in ((num_experts, rows, columns), (num_experts, columns, rows)):
            raise CheckpointError(
                f"{name} is {list(found)}; expected {[num_experts, rows, columns]} "
                f"or {[num_experts, columns, rows]}"
            )
        if rows != columns:
            votes.add(found[1] == columns)
    if len(votes) > 1:
        raise CheckpointError(
            f"some fused tensors are transposed and some are not: {', '.join(shapes)}"
        )
    return votes == {True}


def _part(
    whole: StoredTensor, entry: WeightEntry, shape: Shape, name: str, transposed: bool
) -> StoredTensor:
    """Return an expert's rows of a fused tensor, or of its scales: one for several rows, for each, or for all."""
    num_experts, num_rows, _ = shape
    first, end = entry.rows or (0, num_rows)
    if whole.shape[:1] != (num_experts,) or len(whole.shape) not in (1, 3):
        raise CheckpointError(f"{name} is {list(whole.shape)}; expected {num_experts} matrices")
    num_bytes = whole.num_bytes // num_experts
    assert entry.expert is not None, entry
    offset = whole.offset + entry.expert * num_bytes
    matrix = replace(whole, shape=whole.shape[1:], offset=offset, num_bytes=num_bytes)
    if not matrix.shape:  # one scale for each expert
        return matrix
    stored_rows = matrix.shape[1 if transposed else 0]
    if stored_rows == 1:  # of scales
        first, end = 0, 1
    elif first * stored_rows % num_rows or end * stored_rows % num_rows:
        raise CheckpointError(
            f"{name} has {stored_rows} rows of scales for {num_rows} rows; some belong to gate and to up"
        )
    else:
        first, end = first * stored_rows // num_rows, end * stored_rows // num_rows
    if transposed:
        return replace(matrix, shape=(end - first, matrix.shape[0]), columns=(first, end))
    row_bytes = num_bytes // stored_rows
    return replace(
        matrix,
        shape=(end - first, *matrix.shape[1:]),
        offset=offset + first * row_bytes,
        num_bytes=(end - first) * row_bytes,
    )
