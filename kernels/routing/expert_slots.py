"""Slots in the place of experts, by a SlotTable, where no Triton kernel chooses the experts.

T tokens, K experts per token.
"""

import torch

from kernels.native.library import load_or_none
from kernels.slot_table import SlotTable


def to_slots(topk_idx_TK: torch.Tensor, table: SlotTable | None, spread: bool) -> torch.Tensor:
    """Return slots int64 [T, K] of logical experts int64 [T, K], perhaps in place; -1 stays -1.

    table    None: slots are experts
    spread   row t takes copy (t + first) % copies of its experts; otherwise the first copy
    """
    if table is None:
        return topk_idx_TK
    native = load_or_none() if not topk_idx_TK.is_cuda else None
    if native is not None:
        topk_idx_TK = topk_idx_TK.contiguous()
        native.expert_slots(
            topk_idx_TK.data_ptr(),
            *topk_idx_TK.shape,
            table.slots_EC.data_ptr(),
            table.copies_E.data_ptr(),
            table.slots_EC.shape[1],
            table.first,
            spread,
        )
        return topk_idx_TK
    expert_TK = topk_idx_TK.clamp(min=0)
    column_TK = torch.zeros_like(expert_TK)
    if spread:
        row_T1 = torch.arange(len(expert_TK), device=expert_TK.device).unsqueeze(1)
        column_TK = (row_T1 + table.first) % table.copies_E[expert_TK]
    slots_TK = table.slots_EC[expert_TK, column_TK].long()
    return torch.where(topk_idx_TK < 0, topk_idx_TK, slots_TK)
