"""Triton kernel of `kernels.routing.forced_routing`: the experts of each token by a law.

T tokens, E experts, K experts per token.
"""

import torch
import triton
import triton.language as tl

from kernels.slot_table import SlotTable
from kernels.triton.pdl import begin, dependent_launch
from kernels.triton.route import top_k_keys
from kernels.triton.slots import expert_slots, slot_arguments

NOISE_SHIFT = tl.constexpr(16)  # 32 minus the bits of the noise table


@triton.jit
def _mix(x):
    """MurmurHash3's finaliser of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(
    do_not_specialize=[
        *("input_ids_ptr", "positions_ptr", "layer", "num_tokens", "num_tokens_ptr", "first")
    ]
)
def _forced_route(
    input_ids_ptr,
    positions_ptr,
    table_ptr,
    noise_ptr,
    layer,
    num_tokens,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    slots_ptr,
    copies_ptr,
    first,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_TURN: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_K)
    chosen = choice < TOP_K
    if IN_TURN:
        ids = tl.load(table_ptr + (token * TOP_K + choice) % NUM_EXPERTS)
    else:
        position = tl.load(positions_ptr + token).to(tl.uint32)
        input_id = tl.load(input_ids_ptr + token).to(tl.uint32)
        key = _mix(_mix(position + layer.to(tl.uint32) * 0x9E3779B1) + input_id * 0x85EBCA77)
        expert = tl.arange(0, BLOCK_E)
        bits = _mix(key + (expert + 1).to(tl.uint32) * 0xC2B2AE3D) >> NOISE_SHIFT
        inside = expert < NUM_EXPERTS
        score = tl.load(noise_ptr + bits) + tl.load(table_ptr + expert, mask=inside, other=0.0)
        best_keys = top_k_keys(score, expert, inside, TOP_K, BLOCK_E, BLOCK_K)
        ids = BLOCK_E - 1 - (best_keys & 0xFFFFFFFF)
    if ON_DEVICE:
        num_tokens = tl.load(num_tokens_ptr)
    routed = chosen & (token < num_tokens)
    ids = expert_slots(ids, routed, token, slots_ptr, copies_ptr, first, COLUMNS, SPREAD)
    tl.store(ids_ptr + token * TOP_K + choice, ids, mask=chosen)
    tl.store(weights_ptr + token * TOP_K + choice, 1.0 / TOP_K, mask=chosen)


def forced_route(
    input_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    table_E: torch.Tensor,
    noise: torch.Tensor,
    *,
    in_turn: bool,
    layer: int,
    top_k: int,
    num_tokens: int | torch.Tensor,
    table: SlotTable | None = None,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts int64 [T, K] and topk_weights float32 [T, K], as ForcedRouting does.

    input_ids, positions   int64, contiguous
    table_E      with `in_turn` int64, the experts in turn; else float32, the logarithm of each expert's likelihood
    noise        float32 [2^16]
    num_tokens   rows from it on get ids of -1; an int, or an integer tensor [1] on the device
    table, spread   return slots in the place of experts, see kernels.routing.expert_slots; None: experts
    """
    num_rows, (num_experts,) = len(positions_T), table_E.shape
    ids_TK = torch.empty(num_rows, top_k, dtype=torch.int64, device=positions_T.device)
    weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=positions_T.device)
    on_device = isinstance(num_tokens, torch.Tensor)
    slots, constants = slot_arguments(table, spread, ids_TK)
    if num_rows:
        _forced_route[(num_rows,)](
            input_ids_T,
            positions_T,
            table_E,
            noise,
            layer,
            0 if on_device else num_tokens,
            num_tokens if on_device else ids_TK,
            ids_TK,
            weights_TK,
            *slots,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            IN_TURN=in_turn,
            ON_DEVICE=on_device,
            **constants,
            **dependent_launch(num_rows),
            num_warps=1,
        )
    return ids_TK, weights_TK
