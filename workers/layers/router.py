"""Chooses each token's experts. Knows nothing of where experts live.

T tokens, D hidden, E experts, K experts per token.
"""

import torch

from kernels.fused import fused_kernels
from kernels.native.dense import dense_kernels
from workers.layers.linear import linear
from workers.models.specs import RouterSpec


def route_tokens(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    spec: RouterSpec,
    num_tokens: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return topk_idx int64 [T, K], best first, and topk_weights float32 [T, K] of the best scores.

    Rows from `num_tokens` on are padding: their topk_idx is -1. On a GPU `num_tokens` may be an integer tensor [1]
    there, which a captured graph reads at each replay.
    """
    logits_TE = linear(x_TD, router_ED)
    top_k, renormalise = spec.top_k, spec.renormalise
    fused = fused_kernels(x_TD.device.type)
    if fused is not None:
        return fused.route_top_k(
            logits_TE, top_k, renormalise, num_tokens, score=spec.score, scaling=spec.scaling
        )
    logits_TE = logits_TE.float()
    native = dense_kernels(x_TD.device.type, x_TD.dtype)
    if native is not None:
        topk_idx_TK, topk_weights_TK = native.route_top_k(
            logits_TE, top_k, renormalise, score=spec.score, scaling=spec.scaling
        )
    else:
        topk_idx_TK, topk_weights_TK = _route_with_torch(logits_TE, spec)
    if num_tokens < topk_idx_TK.shape[0]:
        topk_idx_TK[num_tokens:] = -1
    return topk_idx_TK, topk_weights_TK


def _route_with_torch(
    logits_TE: torch.Tensor, spec: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.score == "softmax" and not spec.renormalise:
        logits_TE = torch.softmax(logits_TE, dim=-1)
    best_TK, topk_idx_TK = torch.topk(logits_TE, spec.top_k)
    weights_TK = best_TK
    if spec.score == "sigmoid":
        weights_TK = best_TK.sigmoid()
        if spec.renormalise:
            weights_TK /= weights_TK.sum(-1, keepdim=True) + 1e-20
    elif spec.renormalise:
        # softmax, top-k, divide by the sum == softmax of the k best logits, two operators less
        weights_TK = torch.softmax(best_TK, dim=-1)
    return topk_idx_TK, weights_TK if spec.scaling == 1.0 else weights_TK.mul_(spec.scaling)
