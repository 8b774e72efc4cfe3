"""Triton kernel that chooses each token's experts: K best logits and their weights. T tokens, E experts, K chosen."""

import torch
import triton
import triton.language as tl

from kernels.slot_table import SlotTable
from kernels.triton.pdl import begin, dependent_launch
from kernels.triton.slots import expert_slots, slot_arguments


@triton.jit
def top_k_keys(
    logit,
    expert,
    inside,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The TOP_K best of float32 logits, best first, as (order of the logit << 32) | (BLOCK_E - 1 - expert)."""
    # One integer that sorts like (logit, -id): one reduction finds both, ties go to the lower id, and a NaN sorts as a
    # number, so an id is always one of an expert.
    bits = logit.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (order << 32) | (BLOCK_E - 1 - expert).to(tl.int64)
    lowest: tl.constexpr = -(2**63)
    key = tl.where(inside, key, lowest)
    choice = tl.arange(0, BLOCK_K)
    best_keys = tl.full((BLOCK_K,), lowest, tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(key)
        best_keys = tl.where(choice == k, best, best_keys)
        key = tl.where(key == best, lowest, key)
    return best_keys


@triton.jit(do_not_specialize=["num_tokens", "num_tokens_ptr", "first"])
def _route_top_k(
    logits_ptr,
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
    NORM_TOPK_PROB: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALING: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < NUM_EXPERTS
    logit = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    best_keys = top_k_keys(logit, expert, inside, TOP_K, BLOCK_E, BLOCK_K)
    choice = tl.arange(0, BLOCK_K)
    ids = BLOCK_E - 1 - (best_keys & 0xFFFFFFFF)
    best_order = (best_keys >> 32).to(tl.int32)
    best_bits = tl.where(best_order < 0, best_order ^ 0x7FFFFFFF, best_order)
    chosen = choice < TOP_K
    best_logit = tl.where(chosen, best_bits.to(tl.float32, bitcast=True), float("-inf"))
    if SIGMOID:
        weights = tl.sigmoid(best_logit)
        if NORM_TOPK_PROB:
            weights = weights / (tl.sum(weights) + 1e-20)
    else:
        top = tl.max(best_logit)
        weights = tl.exp(best_logit - top)
        total = tl.sum(weights)
        if not NORM_TOPK_PROB:
            total = tl.sum(tl.exp(logit - top))
        weights = weights / total
    if SCALING != 1.0:
        weights = weights * SCALING
    if ON_DEVICE:
        num_tokens = tl.load(num_tokens_ptr)
    routed = chosen & (token < num_tokens)
    ids = expert_slots(ids, routed, token, slots_ptr, copies_ptr, first, COLUMNS, SPREAD)
    tl.store(ids_ptr + token * TOP_K + choice, ids, mask=chosen)
    tl.store(weights_ptr + token * TOP_K + choice, weights, mask=chosen)


def route_top_k(
    logits_TE: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    num_tokens: int | torch.Tensor,
    *,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    table: SlotTable | None = None,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts int64 [T, K], best first, and their weights float32 [T, K].

    logits       any floating dtype, contiguous
    norm_topk_prob  divide the weights of a row by their sum
    num_tokens   rows from it on get ids of -1; an integer tensor [1] on the device is read at each replay of a graph
    scoring_func "softmax" over all logits of a row, or "sigmoid" of each
    routed_scaling_factor  factor on the weights
    table, spread   return slots in the place of experts, see kernels.routing.expert_slots; None: experts
    """
    num_rows, num_experts = logits_TE.shape
    assert logits_TE.is_contiguous()
    ids_TK = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits_TE.device)
    on_device = isinstance(num_tokens, torch.Tensor)
    slots, constants = slot_arguments(table, spread, ids_TK)
    if num_rows:
        _route_top_k[(num_rows,)](
            logits_TE,
            0 if on_device else num_tokens,
            num_tokens if on_device else ids_TK,
            ids_TK,
            weights_TK,
            *slots,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            NORM_TOPK_PROB=norm_topk_prob,
            SIGMOID=scoring_func == "sigmoid",
            SCALING=routed_scaling_factor,
            ON_DEVICE=on_device,
            **constants,
            **dependent_launch(num_rows),
            num_warps=1,
        )
    return ids_TK, weights_TK
