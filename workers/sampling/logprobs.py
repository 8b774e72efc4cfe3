"""Log-probabilities of output and prompt tokens, from raw logits. Knows nothing of models and scheduling.

Raw logits are the model's, before grammar, bias, penalties and temperature.

T tokens of a forward, N rows, V vocabulary, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.step.sequence import PROMPT, ScheduledSequence, Sequence
from workers.wire.request import TokenLogprobs

# From hidden states [N, D] of a sequence, and the slot of its adapter, to logits float32 [N, V].
ComputeLogits = Callable[[torch.Tensor, int], torch.Tensor]
ToHost = Callable[[torch.Tensor], torch.Tensor]

# Rows of logits that exist at one time, because the logits of a whole prompt take 2.5 GB (4096 x 152k float32).
MAX_LOGITS_ROWS = 256


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of N tokens, with K alternatives each, of which num_top[n] are reported for token n."""

    logprob_N: torch.Tensor
    rank_N: torch.Tensor
    top_ids_NK: torch.Tensor
    top_logprobs_NK: torch.Tensor
    num_top: list[int]

    def to(self, copy: ToHost) -> "LogprobTensors":
        """Return a copy with tensors copied by `copy`."""
        return LogprobTensors(
            copy(self.logprob_N),
            copy(self.rank_N),
            copy(self.top_ids_NK),
            copy(self.top_logprobs_NK),
            self.num_top,
        )

    def lists(self) -> list[TokenLogprobs]:
        """Return one entry for each token."""
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
    """Return the log-probabilities of int64 tokens >= 0 from float32 logits, with num_top[n] alternatives."""
    logprobs_NV = logits_NV.log_softmax(dim=-1)  # eight times as fast as logsumexp on a CPU
    index_N1 = token_N.unsqueeze(1)
    # A GPU converts the comparisons to the type of the sum before it adds: int64 would take twice the bytes of logits.
    rank_N = (logits_NV > logits_NV.gather(1, index_N1)).sum(dim=-1, dtype=torch.int32) + 1
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
    """Log-probabilities of a prompt so far: of `num_targets` tokens, without the first token."""

    parts: list[LogprobTensors]
    num_targets: int = 0

    def to(self, copy: ToHost) -> "PromptParts":
        """Return a copy with tensors copied by `copy`."""
        return PromptParts([part.to(copy) for part in self.parts], self.num_targets)

    def lists(self) -> list[TokenLogprobs | None]:
        """Return one entry for each token, None for the first."""
        return [None, *(found for part in self.parts for found in part.lists())]


# By request id.
CompletePrompts = dict[str, PromptParts]


class PromptLogprobs:
    """Collects the log-probabilities of prompts while they are prefilled, in one step or in chunks."""

    def __init__(self) -> None:
        # By row of the sequence, until the prompt is complete or another sequence moves in.
        self._unfinished: dict[int, PromptParts] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row. It is computed from its first token on if it reports its prompt.

        A sequence with output has reported its prompt already.
        """
        self._unfinished.pop(seq.row, None)
        if seq.request.params.prompt_logprobs is not None and not seq.num_output_tokens:
            assert seq.num_computed_tokens == 0, "cached tokens have no logits"
            self._unfinished[seq.row] = PromptParts([])

    def collect(
        self,
        parts: list[ScheduledSequence],
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        hidden_TD: torch.Tensor,
        compute_logits: ComputeLogits,
    ) -> CompletePrompts | None:
        """Add the hidden states of a forward; return the prompts that are now complete, None without any.

        query_start_loc   int32 [B+1]: start of each sequence's new tokens in hidden_TD
        seq_lens          int32 [B]: tokens of each sequence, the new ones included. The sequences may have advanced.
        """
        if not self._unfinished:
            return None
        complete: CompletePrompts = {}
        for index, part in enumerate(parts):
            seq = part.seq
            found = self._unfinished.get(seq.row)
            if found is None:
                continue
            assert part.kind is PROMPT, f"{part.kind=}"
            first, last = query_start_loc[index : index + 2]
            start = seq_lens[index] - (last - first)
            assert start == found.num_targets, f"{start=}, {found.num_targets=}"
            prompt = seq.request.prompt_token_ids
            # Each position predicts the next token; the last position of the prompt predicts the first output.
            targets = prompt[found.num_targets + 1 : found.num_targets + 1 + last - first]
            num_top = seq.request.params.prompt_logprobs
            assert num_top is not None, "admit keeps only sequences that report their prompt"
            rows_ND = hidden_TD[first:last]
            found.parts += _of_targets(targets, num_top, rows_ND, seq.adapter_slot, compute_logits)
            found.num_targets += len(targets)
            if part.num_logits:  # of the last token of the prompt
                complete[seq.request.request_id] = self._unfinished.pop(seq.row)
        return complete or None


def _of_targets(
    targets: list[int],
    num_top: int,
    hidden_ND: torch.Tensor,
    adapter_slot: int,
    compute_logits: ComputeLogits,
) -> list[LogprobTensors]:
    """Return the log-probabilities of `targets`: hidden_ND[i] predicts targets[i], further rows are ignored."""
    found: list[LogprobTensors] = []
    for first in range(0, len(targets), MAX_LOGITS_ROWS):
        ids = np.array(targets[first : first + MAX_LOGITS_ROWS], dtype=np.int64)
        rows_ND, ids_N = hidden_ND[first : first + len(ids)], to_device(ids, hidden_ND.device)
        # The logits have no name here, so that those of two parts never exist at one time.
        tops = [num_top] * len(ids)
        found.append(token_logprobs(compute_logits(rows_ND, adapter_slot), ids_N, tops))
    return found
