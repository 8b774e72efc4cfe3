"""The last part of the Triton kernels that choose experts: slots in the place of experts, by a SlotTable.

T tokens, K experts per token, E logical experts, C most copies of an expert.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.slot_table import SlotTable


@triton.jit
def expert_slots(
    ids,
    inside,
    token,
    slots_ptr,
    copies_ptr,
    first,
    COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The slots of a token's experts `ids`, -1 where not `inside`; without COLUMNS the experts themselves."""
    if COLUMNS > 0:
        column = tl.zeros_like(ids)
        if SPREAD:
            copies = tl.load(copies_ptr + ids, mask=inside, other=1).to(tl.int64)
            column = (token + first) % copies
        ids = tl.load(slots_ptr + ids * COLUMNS + column, mask=inside, other=-1).to(tl.int64)
    return tl.where(inside, ids, -1)


def slot_arguments(
    table: SlotTable | None, spread: bool, unused: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (slots_ptr, copies_ptr, first) and the constants of `expert_slots`.

    unused   any tensor of the device, which is not read
    """
    if table is None:
        return (unused, unused, 0), {"COLUMNS": 0, "SPREAD": False}
    columns = table.slots_EC.shape[1]
    constants = {"COLUMNS": columns, "SPREAD": spread and columns > 1}
    return (table.slots_EC, table.copies_E, table.first), constants
