"""Chooses each token's experts, and their slots where a table of the layer's map is given.

T tokens, D hidden, E experts, K experts per token, G groups of e neighbouring experts.
"""

from typing import Any

import torch

from kernels.fused import fused_kernels
from kernels.native.dense import dense_kernels
from kernels.routing.expert_slots import to_slots
from kernels.slot_table import SlotTable
from workers.layers.linear import DenseLinear
from workers.specs.model import RouterSpec


def route_tokens(
    x_TD: torch.Tensor,
    router: DenseLinear,
    spec: RouterSpec,
    num_tokens: int | torch.Tensor,
    bias_E: torch.Tensor | None = None,
    table: SlotTable | None = None,
    *,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return topk_idx int64 [T, K], best first, and topk_weights float32 [T, K] of the best scores.

    Rows from `num_tokens` on are padding: their topk_idx is -1. On a GPU `num_tokens` may be an integer tensor [1]
    on the device, which a captured graph reads at each replay. bias_E float32 [E] is added to the scores that choose
    the experts, not to topk_weights. With a table topk_idx are slots, see kernels.routing.expert_slots.
    """
    slots: dict[str, Any] = {"table": table, "spread": spread}
    if not spec.plain:
        return _route_in_groups(x_TD, router, spec, num_tokens, bias_E, slots)
    logits_TE = router(x_TD)
    top_k, norm_topk_prob = spec.top_k, spec.norm_topk_prob
    fused = fused_kernels(x_TD.device.type)
    if fused is not None:
        return fused.route_top_k(
            logits_TE,
            top_k,
            norm_topk_prob,
            num_tokens,
            scoring_func=spec.scoring_func,
            routed_scaling_factor=spec.routed_scaling_factor,
            **slots,
        )
    logits_TE = logits_TE.float()
    native = dense_kernels(x_TD.device.type, x_TD.dtype)
    if native is not None:
        topk_idx_TK, topk_weights_TK = native.route_top_k(
            logits_TE,
            top_k,
            norm_topk_prob,
            scoring_func=spec.scoring_func,
            routed_scaling_factor=spec.routed_scaling_factor,
        )
    else:
        topk_idx_TK, topk_weights_TK = _route_with_torch(logits_TE, spec)
    return _finish(topk_idx_TK, topk_weights_TK, num_tokens, **slots)


def _finish(
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    num_tokens: int | torch.Tensor,
    table: SlotTable | None,
    spread: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give rows from `num_tokens` on no expert, in place, then slots to experts."""
    if isinstance(num_tokens, torch.Tensor):
        rows_T = torch.arange(len(topk_idx_TK), device=topk_idx_TK.device)
        topk_idx_TK.masked_fill_((rows_T >= num_tokens).unsqueeze(1), -1)
    elif num_tokens < len(topk_idx_TK):
        topk_idx_TK[num_tokens:] = -1
    return to_slots(topk_idx_TK, table, spread), topk_weights_TK


def _route_in_groups(
    x_TD: torch.Tensor,
    router: DenseLinear,
    spec: RouterSpec,
    num_tokens: int | torch.Tensor,
    bias_E: torch.Tensor | None,
    slots: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score and bias among the experts of the best groups; weigh by the scores without bias.

    Logits are float32 products whatever the model's dtype, because close scores decide between experts.
    """
    logits_TE = router.in_float32(x_TD)
    fused = fused_kernels(x_TD.device.type)
    if fused is None:
        return _finish(*choose_in_groups(logits_TE, spec, bias_E), num_tokens, **slots)
    return fused.route_groups(
        logits_TE,
        bias_E,
        spec.top_k,
        num_tokens,
        num_groups=spec.num_groups,
        topk_group=spec.topk_group,
        group_score=spec.group_score,
        norm_topk_prob=spec.norm_topk_prob,
        scoring_func=spec.scoring_func,
        routed_scaling_factor=spec.routed_scaling_factor,
        **slots,
    )


def choose_in_groups(
    logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts and their weights of float32 logits, by torch's operators."""
    softmax = spec.scoring_func == "softmax"
    scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.topk_group < spec.num_groups:
        choice_TE = _close_groups(choice_TE, spec)
    topk_idx_TK = choice_TE.topk(spec.top_k).indices
    weights_TK = scores_TE.gather(1, topk_idx_TK)
    if spec.norm_topk_prob:
        weights_TK /= weights_TK.sum(-1, keepdim=True) + 1e-20
    return topk_idx_TK, weights_TK.mul_(spec.routed_scaling_factor)


def _close_groups(choice_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return the scores with -inf for the experts of all but the best groups."""
    choice_TGe = choice_TE.view(len(choice_TE), spec.num_groups, -1)
    counted = 1 if spec.group_score == "max" else 2
    groups_TG = choice_TGe.topk(counted).values.sum(-1)
    closed_TG = torch.ones_like(groups_TG, dtype=torch.bool)
    closed_TG.scatter_(1, groups_TG.topk(spec.topk_group).indices, False)
    # not 0: a biased score may be negative, and 0 would then open the group again
    return choice_TGe.masked_fill(closed_TG.unsqueeze(-1), float("-inf")).flatten(1)


def _route_with_torch(
    logits_TE: torch.Tensor, spec: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.scoring_func == "softmax" and not spec.norm_topk_prob:
        logits_TE = torch.softmax(logits_TE, dim=-1)
    best_TK, topk_idx_TK = torch.topk(logits_TE, spec.top_k)
    weights_TK = best_TK
    if spec.scoring_func == "sigmoid":
        weights_TK = best_TK.sigmoid()
        if spec.norm_topk_prob:
            weights_TK /= weights_TK.sum(-1, keepdim=True) + 1e-20
    elif spec.norm_topk_prob:
        # softmax, top-k, divide by the sum == softmax of the k best logits, two operators less
        weights_TK = torch.softmax(best_TK, dim=-1)
    return topk_idx_TK, weights_TK if spec.routed_scaling_factor == 1.0 else weights_TK.mul_(
        spec.routed_scaling_factor
    )
