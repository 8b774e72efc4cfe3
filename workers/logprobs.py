"""Log-probabilities of tokens from raw logits, of outputs and of prompts. Knows no model and no scheduling.

Raw: as the model gave them, before grammar, bias, penalties and temperature.

T tokens of a forward, N rows, V vocabulary, D hidden size.
"""

from collections.abc import Callable

import numpy as np
import torch

from workers.request import TokenLogprobs
from workers.sequence import Sequence

# [N, D] of the model's result to float32 [N, V].
ComputeLogits = Callable[[torch.Tensor], torch.Tensor]
# By request id.
CompletePrompts = dict[str, list[TokenLogprobs | None]]

# Rows whose logits exist at the same time: a whole prompt's would not fit (4096 x 152k float32 = 2.5 GB).
MAX_LOGITS_ROWS = 256


def token_logprobs(
    logits_NV: torch.Tensor, token_N: torch.Tensor, num_top: list[int]
) -> list[TokenLogprobs]:
    """What float32 logits say of int64 tokens >= 0, with the num_top[n] most probable tokens beside token n."""
    logprobs_NV = logits_NV.log_softmax(dim=-1)  # logsumexp takes eight times as long on a CPU
    index_N1 = token_N.unsqueeze(1)
    rank_N = (logits_NV > logits_NV.gather(1, index_N1)).sum(dim=-1) + 1
    top_NK = logits_NV.topk(min(max(num_top, default=0), logits_NV.shape[1])).indices
    rows = zip(
        logprobs_NV.gather(1, index_N1).squeeze(1).tolist(),
        rank_N.tolist(),
        top_NK.tolist(),
        logprobs_NV.gather(1, top_NK).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(logprob, rank, ids[:count], logprobs[:count])
        for logprob, rank, ids, logprobs, count in rows
    ]


class PromptLogprobs:
    """Collects prompts' log-probabilities while they are prefilled, in one step or in chunks."""

    def __init__(self) -> None:
        # By the sequence's row, until the prompt is complete or another sequence moves in.
        self._unfinished: dict[int, list[TokenLogprobs | None]] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row, to be computed from its first token on if its prompt is wanted.

        Whoever has output has been told of its prompt already.
        """
        self._unfinished.pop(seq.row, None)
        if seq.request.params.prompt_logprobs is not None and not seq.num_output_tokens:
            assert seq.num_computed == 0, "cached tokens have no logits"
            self._unfinished[seq.row] = [None]

    def collect(
        self,
        seqs: list[Sequence],
        query_start_loc: np.ndarray,
        hidden_TD: torch.Tensor,
        compute_logits: ComputeLogits,
    ) -> CompletePrompts | None:
        """Add a forward's result for `seqs` before they advance; the prompts that are now complete.

        query_start_loc int32 [B+1]: where each sequence's new tokens start in hidden_TD.
        """
        if not self._unfinished:
            return None
        complete: CompletePrompts = {}
        for index, seq in enumerate(seqs):
            found = self._unfinished.get(seq.row)
            if found is None:
                continue
            assert seq.num_computed == len(found) - 1, f"{seq.num_computed=}, have {len(found)}"
            first, last = query_start_loc[index : index + 2]
            prompt = seq.request.prompt_token_ids
            # Each position predicts the next one's token; the prompt's last one predicts the first output.
            targets = prompt[len(found) : len(found) + last - first]
            num_top = seq.request.params.prompt_logprobs
            found += _of_targets(targets, num_top, hidden_TD[first:last], compute_logits)
            if seq.num_computed + last - first == len(prompt):  # this step samples
                complete[seq.request.request_id] = self._unfinished.pop(seq.row)
        return complete or None


def _of_targets(
    targets: list[int], num_top: int, hidden_ND: torch.Tensor, compute_logits: ComputeLogits
) -> list[TokenLogprobs]:
    """hidden_ND[i] predicts targets[i]; more rows than targets may be there."""
    found: list[TokenLogprobs] = []
    for first in range(0, len(targets), MAX_LOGITS_ROWS):
        ids = targets[first : first + MAX_LOGITS_ROWS]
        token_N = torch.tensor(ids, dtype=torch.int64, device=hidden_ND.device)
        logits_NV = compute_logits(hidden_ND[first : first + len(ids)])
        found += token_logprobs(logits_NV, token_N, [num_top] * len(ids))
    return found
