"""Chooses each token's experts. Knows nothing of where experts live.

T tokens, D hidden, E experts, K experts per token.
"""

import torch

from kernels.fused import fused_kernels
from kernels.native.dense import dense_kernels
from workers.layers.linear import linear


def route_tokens(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    *,
    top_k: int,
    renormalise: bool,
    num_tokens: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the experts in float32, then the `top_k` best.

    Returns topk_idx int64 [T, K], best first, and topk_weights float32 [T, K], which sum to 1 per
    token when `renormalise`. Rows from `num_tokens` on are padding: their topk_idx is -1. On a GPU
    `num_tokens` may be an integer tensor [1] there, which a captured graph reads at each replay.
    """
    logits_TE = linear(x_TD, router_ED)
    fused = fused_kernels(x_TD.device.type)
    if fused is not None:
        return fused.route_top_k(logits_TE, top_k, renormalise, num_tokens)
    logits_TE = logits_TE.float()
    native = dense_kernels(x_TD.device.type, x_TD.dtype)
    if native is not None:
        topk_idx_TK, topk_weights_TK = native.route_top_k(logits_TE, top_k, renormalise)
    elif renormalise:
        # softmax, top-k, divide by the sum == softmax of the k best logits, two operators less
        best_TK, topk_idx_TK = torch.topk(logits_TE, top_k)
        topk_weights_TK = torch.softmax(best_TK, dim=-1)
    else:
        topk_weights_TK, topk_idx_TK = torch.topk(torch.softmax(logits_TE, dim=-1), top_k)
    if num_tokens < topk_idx_TK.shape[0]:
        topk_idx_TK[num_tokens:] = -1
    return topk_idx_TK, topk_weights_TK
