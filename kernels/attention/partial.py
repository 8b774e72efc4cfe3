"""Attention over a part of the keys, by torch's operators in float32, and the merge of such parts by log-sum-exps.

H heads, M query rows, d head dim, v values of a head of the output, L keys.
"""

import torch


def partial_attention(
    q_HMd: torch.Tensor, k_HLd: torch.Tensor, v_HLv: torch.Tensor, scale: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over these keys alone, [H, M, v], and the log-sum-exp of each row's scores, [H, M]; float32.

    Row i attends to keys 0 to `offset + i`. A row without keys has zeros, and a log-sum-exp of -inf.
    """
    scores_HML = torch.matmul(q_HMd, k_HLd.transpose(1, 2)).mul_(scale)
    num_rows, num_keys = scores_HML.shape[1:]
    if offset < num_keys - 1:
        seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q_HMd.device)
        scores_HML.masked_fill_(seen.tril_(offset).logical_not_(), float("-inf"))
    lse_HM = torch.logsumexp(scores_HML, -1)
    weights_HML = scores_HML.sub_(_finite(lse_HM).unsqueeze(-1)).exp_()
    return torch.matmul(weights_HML, v_HLv), lse_HM


def merge_partial(
    o_HMv: torch.Tensor, lse_HM: torch.Tensor, other_HMv: torch.Tensor, other_HM: torch.Tensor
) -> None:
    """Merge the attention over other keys into o and lse, in place. -inf: no keys."""
    total_HM = torch.logaddexp(lse_HM, other_HM)
    floor_HM = _finite(total_HM)  # -inf - -inf would be NaN
    o_HMv.mul_((lse_HM - floor_HM).exp_().unsqueeze(-1))
    o_HMv.add_(other_HMv.mul_((other_HM - floor_HM).exp_().unsqueeze(-1)))
    lse_HM.copy_(total_HM)


def _finite(lse_HM: torch.Tensor) -> torch.Tensor:
    """Return the values with 0 for -inf."""
    return lse_HM.masked_fill(lse_HM == float("-inf"), 0.0)
