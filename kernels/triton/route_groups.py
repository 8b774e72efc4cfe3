"""Triton kernel that chooses each token's experts by biased scores among the experts of the best groups.

T tokens, E experts, K chosen, G groups of neighbouring experts.
"""

import torch
import triton
import triton.language as tl

from kernels.slot_table import SlotTable
from kernels.triton.route import top_k_keys
from kernels.triton.slots import expert_slots, slot_arguments


@triton.jit
def _open_groups(
    choice,
    expert,
    inside,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Whether each expert is in one of the TOPK_GROUP best groups; TOP2: by the sum of its two best experts."""
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group_of = expert // group_size
    group = tl.arange(0, BLOCK_G)
    score = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        members = tl.where(inside & (group_of == g), choice, float("-inf"))
        best = tl.max(members)
        if TOP2:
            first = tl.min(tl.where(members == best, expert, NUM_EXPERTS))
            best += tl.max(tl.where(expert == first, float("-inf"), members))
        score = tl.where(group == g, best, score)
    keys = top_k_keys(score, group, group < NUM_GROUPS, TOPK_GROUP, BLOCK_G, BLOCK_G)
    best_groups = BLOCK_G - 1 - (keys & 0xFFFFFFFF)
    is_open = expert < 0
    for g in tl.static_range(TOPK_GROUP):
        is_open = is_open | (group_of == tl.sum(tl.where(group == g, best_groups, 0)))
    return is_open


@triton.jit(do_not_specialize=["num_tokens", "num_tokens_ptr", "first"])
def _route_groups(
    logits_ptr,
    bias_ptr,
    num_tokens,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    slots_ptr,
    copies_ptr,
    first,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BIAS: tl.constexpr,
    NORM_TOPK_PROB: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALING: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < NUM_EXPERTS
    logit = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    choice = score
    if BIAS:
        choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    if TOPK_GROUP < NUM_GROUPS:
        inside &= _open_groups(
            choice, expert, inside, NUM_EXPERTS, NUM_GROUPS, TOPK_GROUP, TOP2, BLOCK_G
        )
    keys = top_k_keys(choice, expert, inside, TOP_K, BLOCK_E, BLOCK_K)
    ids = BLOCK_E - 1 - (keys & 0xFFFFFFFF)
    nth = tl.arange(0, BLOCK_K)
    weights = tl.full((BLOCK_K,), 0.0, tl.float32)
    for k in tl.static_range(TOP_K):  # of the scores without bias
        chosen = tl.sum(tl.where(nth == k, ids, 0))
        weights = tl.where(nth == k, tl.sum(tl.where(expert == chosen, score, 0.0)), weights)
    if NORM_TOPK_PROB:
        weights = weights / (tl.sum(weights) + 1e-20)
    weights = weights * SCALING
    if ON_DEVICE:
        num_tokens = tl.load(num_tokens_ptr)
    routed = (nth < TOP_K) & (token < num_tokens)
    ids = expert_slots(ids, routed, token, slots_ptr, copies_ptr, first, COLUMNS, SPREAD)
    tl.store(ids_ptr + token * TOP_K + nth, ids, mask=nth < TOP_K)
    tl.store(weights_ptr + token * TOP_K + nth, weights, mask=nth < TOP_K)


def route_groups(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    num_tokens: int | torch.Tensor,
    *,
    num_groups: int,
    topk_group: int,
    group_score: str,
    norm_topk_prob: bool,
    scoring_func: str,
    routed_scaling_factor: float,
    table: SlotTable | None = None,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts int64 [T, K], best first, and their weights float32 [T, K].

    logits       float32, contiguous; bias float32, for the choice alone, None: no bias
    num_tokens   rows from it on get ids of -1; an integer tensor [1] on the device is read at each replay of a graph
    group_score  score of a group: "max" of its experts, or the sum of its two best ("top2")
    scoring_func "softmax" over all logits of a row, or "sigmoid" of each
    norm_topk_prob  divide the weights of a row by their sum; routed_scaling_factor: factor on the weights
    table, spread   return slots in the place of experts, see kernels.routing.expert_slots; None: experts
    """
    num_rows, num_experts = logits_TE.shape
    assert logits_TE.is_contiguous() and num_experts % num_groups == 0
    assert top_k <= topk_group * (num_experts // num_groups), "open groups have too few experts"
    ids_TK = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits_TE.device)
    on_device = isinstance(num_tokens, torch.Tensor)
    slots, constants = slot_arguments(table, spread, ids_TK)
    if num_rows:
        _route_groups[(num_rows,)](
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            0 if on_device else num_tokens,
            num_tokens if on_device else ids_TK,
            ids_TK,
            weights_TK,
            *slots,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            NUM_GROUPS=num_groups,
            TOPK_GROUP=topk_group,
            TOP2=group_score == "top2",
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_G=triton.next_power_of_2(num_groups),
            BIAS=bias_E is not None,
            NORM_TOPK_PROB=norm_topk_prob,
            SIGMOID=scoring_func == "sigmoid",
            SCALING=routed_scaling_factor,
            ON_DEVICE=on_device,
            **constants,
            num_warps=1,
        )
    return ids_TK, weights_TK
