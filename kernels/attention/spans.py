"""Attention with sliding windows and sinks over the keys of one sequence, by torch's operators, in float32.

Runs everywhere, and is the reference of other backends. Knows nothing of caches and of scheduling.

M query rows, H query heads, h KV heads, G = H / h, d head dim, L keys.
"""

import torch

from kernels.interface.attention_spec import AttentionSpec

# Scores that are in memory at once: 64 MiB.
MAX_SCORES = 2**24


def attend_span(
    q_MHd: torch.Tensor,
    k_Lhd: torch.Tensor,
    v_Lhd: torch.Tensor,
    spec: AttentionSpec,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return o_MHd in q's dtype. The last row is at the position of the last key, the row before it one earlier."""
    out_MHd = torch.empty_like(q_MHd, memory_format=torch.contiguous_format)
    num_rows, num_keys = len(q_MHd), len(k_Lhd)
    offset = num_keys - num_rows
    step = max(1, MAX_SCORES // (spec.num_heads * num_keys))
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        last = offset + end
        first = 0 if spec.window is None else max(0, offset + start + 1 - spec.window)
        keys = slice(first, last)
        hidden_ML = _hidden(end - start, last - first, spec.window, q_MHd.device)
        out_MHd[start:end] = _attend(
            q_MHd[start:end], k_Lhd[keys], v_Lhd[keys], spec, sinks_H, hidden_ML
        )
    return out_MHd


def _hidden(num_rows: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the mask bool [M, L] of keys that a row does not attend to; the last row ends with the last key."""
    offset = num_keys - num_rows
    rows_M1 = torch.arange(offset, num_keys, device=device).unsqueeze(1)
    keys_L = torch.arange(num_keys, device=device)
    hidden_ML = keys_L > rows_M1
    return hidden_ML if window is None else hidden_ML | (keys_L <= rows_M1 - window)


def _attend(
    q_MHd: torch.Tensor,
    k_Lhd: torch.Tensor,
    v_Lhd: torch.Tensor,
    spec: AttentionSpec,
    sinks_H: torch.Tensor | None,
    hidden_ML: torch.Tensor,
) -> torch.Tensor:
    num_rows, group = len(q_MHd), spec.group_size
    q_hNd = q_MHd.float().view(num_rows, -1, group, spec.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    k_hdL, v_hLd = k_Lhd.float().permute(1, 2, 0), v_Lhd.float().transpose(0, 1)
    scores_hNL = torch.matmul(q_hNd, k_hdL).mul_(spec.scale)
    scores_hGML = torch.unflatten(scores_hNL, 1, (group, num_rows))
    scores_hGML.masked_fill_(hidden_ML, float("-inf"))
    top_hGM1 = scores_hGML.amax(-1, keepdim=True)
    sinks_hG11 = None
    if sinks_H is not None:
        sinks_hG11 = sinks_H.float().view(-1, group, 1, 1)
        top_hGM1 = torch.maximum(top_hGM1, sinks_hG11)
    weights_hGML = scores_hGML.sub_(top_hGM1).exp_()
    total_hGM1 = weights_hGML.sum(-1, keepdim=True)
    if sinks_hG11 is not None:
        total_hGM1 += (sinks_hG11 - top_hGM1).exp_()
    weights_hGML /= total_hGM1
    o_hNd = torch.matmul(weights_hGML.flatten(1, 2), v_hLd)
    o_hGMd = torch.unflatten(o_hNd, 1, (group, num_rows))
    return o_hGMd.permute(2, 0, 1, 3).flatten(1, 2)
