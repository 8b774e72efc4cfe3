"""Log-probabilities of tokens from raw logits, of outputs and of prompts. Knows no model and no scheduling.

Raw: as the model gave them, before grammar, bias, penalties and temperature.

T tokens of a forward, N rows, V vocabulary, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.sequence import Sequence
from workers.runner.host_copy import to_device
from workers.wire.request import TokenLogprobs

# [N, D] of the model's result to float32 [N, V].
ComputeLogits = Callable[[torch.Tensor], torch.Tensor]
ToHost = Callable[[torch.Tensor], torch.Tensor]

# Rows whose logits exist at the same time: a whole prompt's would not fit (4096 x 152k float32 = 2.5 GB).
MAX_LOGITS_ROWS = 256


@dataclass(frozen=True)
class LogprobTensors:
    """What logits say of N tokens; K alternatives of each, of which token n wants num_top[n]."""

    logprob_N: torch.Tensor
    rank_N: torch.Tensor
    top_ids_NK: torch.Tensor
    top_logprobs_NK: torch.Tensor
    num_top: list[int]

    def to(self, copy: ToHost) -> "LogprobTensors":
        """The same, elsewhere."""
        tensors = (self.logprob_N, self.rank_N, self.top_ids_NK, self.top_logprobs_NK)
        return LogprobTensors(*map(copy, tensors), self.num_top)

    def lists(self) -> list[TokenLogprobs]:
        """One for each token."""
        rows = zip(
            self.logprob_N.tolist(),
            self.rank_N.tolist(),
            self.top_ids_NK.tolist(),
            self.top_logprobs_NK.tolist(),
            self.num_top,
            strict=True,
        )
        return [
            TokenLogprobs(logprob, rank, ids[:count], logprobs[:count])
            for logprob, rank, ids, logprobs, count in rows
        ]


def token_logprobs(
    logits_NV: torch.Tensor, token_N: torch.Tensor, num_top: list[int]
) -> LogprobTensors:
    """What float32 logits say of int64 tokens >= 0, with the num_top[n] most probable tokens beside token n."""
    logprobs_NV = logits_NV.log_softmax(dim=-1)  # logsumexp takes eight times as long on a CPU
    index_N1 = token_N.unsqueeze(1)
    rank_N = (logits_NV > logits_NV.gather(1, index_N1)).sum(dim=-1) + 1
    top_NK = logits_NV.topk(min(max(num_top, default=0), logits_NV.shape[1])).indices
    return LogprobTensors(
        logprobs_NV.gather(1, index_N1).squeeze(1),
        rank_N,
        top_NK,
        logprobs_NV.gather(1, top_NK),
        num_top,
    )


@dataclass
class PromptParts:
    """A prompt's log-probabilities so far: of `num_targets` tokens, all but the first."""

    parts: list[LogprobTensors]
    num_targets: int = 0

    def to(self, copy: ToHost) -> "PromptParts":
        """The same, elsewhere."""
        return PromptParts([part.to(copy) for part in self.parts], self.num_targets)

    def lists(self) -> list[TokenLogprobs | None]:
        """One for each token, None for the first."""
        return [None, *(found for part in self.parts for found in part.lists())]


# By request id.
CompletePrompts = dict[str, PromptParts]


class PromptLogprobs:
    """Collects prompts' log-probabilities while they are prefilled, in one step or in chunks."""

    def __init__(self) -> None:
        # By the sequence's row, until the prompt is complete or another sequence moves in.
        self._unfinished: dict[int, PromptParts] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row, to be computed from its first token on if its prompt is wanted.

        Whoever has output has been told of its prompt already.
        """
        self._unfinished.pop(seq.row, None)
        if seq.request.params.prompt_logprobs is not None and not seq.num_output_tokens:
            assert seq.num_computed == 0, "cached tokens have no logits"
            self._unfinished[seq.row] = PromptParts([])

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
            assert seq.num_computed == found.num_targets, (
                f"{seq.num_computed=}, {found.num_targets=}"
            )
            first, last = query_start_loc[index : index + 2]
            prompt = seq.request.prompt_token_ids
            # Each position predicts the next one's token; the prompt's last one predicts the first output.
            targets = prompt[found.num_targets + 1 : found.num_targets + 1 + last - first]
            num_top = seq.request.params.prompt_logprobs
            found.parts += _of_targets(targets, num_top, hidden_TD[first:last], compute_logits)
            found.num_targets += len(targets)
            if seq.num_computed + last - first == len(prompt):  # this step samples
                complete[seq.request.request_id] = self._unfinished.pop(seq.row)
        return complete or None


def _of_targets(
    targets: list[int], num_top: int, hidden_ND: torch.Tensor, compute_logits: ComputeLogits
) -> list[LogprobTensors]:
    """hidden_ND[i] predicts targets[i]; more rows than targets may be there."""
    found: list[LogprobTensors] = []
    for first in range(0, len(targets), MAX_LOGITS_ROWS):
        ids = np.array(targets[first : first + MAX_LOGITS_ROWS], dtype=np.int64)
        rows_ND, ids_N = hidden_ND[first : first + len(ids)], to_device(ids, hidden_ND.device)
        # Unnamed, so that logits of two parts are never there at once.
        found.append(token_logprobs(compute_logits(rows_ND), ids_N, [num_top] * len(ids)))
    return found
