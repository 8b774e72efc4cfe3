"""From logits to tokens for the running sequences, with all that their parameters ask for. Knows no model.

A batch in which nobody asks for edits or log-probabilities goes straight to the sampler.

B rows, N rows that want log-probabilities, V vocabulary.
"""

import numpy as np
import torch

from workers.logit_edits import LogitEdits, TokenMask
from workers.logprobs import token_logprobs
from workers.request import TokenLogprobs
from workers.sampler import SamplingTable, sample
from workers.sequence import Sequence, SequenceTable


class TokenPicker:
    """Parameters and state of the running sequences by their row in the SequenceTable, here called slot."""

    def __init__(
        self, table: SequenceTable, max_num_seqs: int, vocab_size: int, device: torch.device
    ):
        self._table = table
        self._sampling = SamplingTable(max_num_seqs)
        self._edits = LogitEdits(max_num_seqs, vocab_size, device)
        self._num_logprobs: dict[int, int] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row: for the first time, or again after it was preempted."""
        params, num_prompt = seq.request.params, len(seq.request.prompt_token_ids)
        self._sampling.set(seq.row, params)
        self._edits.set(seq.row, params, seq.token_ids[:num_prompt], seq.token_ids[num_prompt:])
        self._num_logprobs.pop(seq.row, None)
        if params.logprobs is not None:
            self._num_logprobs[seq.row] = params.logprobs

    def pick(
        self,
        logits_BV: torch.Tensor,
        slots_B: np.ndarray,
        positions_B: np.ndarray,
        mask: TokenMask | None = None,
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """A token for each row, -1 where logits are not finite, and the log-probabilities if a row asks for any.

        float32 logits, which are overwritten; positions int64, where each new token will stand.
        """
        asking = self._asking(slots_B)
        raw_NV = logits_BV[list(asking)] if asking else None
        if mask is not None:
            mask.apply(logits_BV)
        edits = self._edits.of(slots_B)
        if edits is not None:
            self._edits.apply(logits_BV, edits, positions_B, self._table.token_ids)
        token_B = sample(logits_BV, self._sampling.batch(slots_B, positions_B))
        if edits is not None:
            self._edits.drawn(token_B, edits)
        if raw_NV is None:
            return token_B.tolist(), None
        return token_B.tolist(), _logprobs(raw_NV, token_B, asking)

    def _asking(self, slots_B: np.ndarray) -> dict[int, int]:
        """Rows that want log-probabilities, and how many tokens beside the one drawn."""
        if not self._num_logprobs:
            return {}
        counts = (self._num_logprobs.get(slot, -1) for slot in slots_B.tolist())
        return {row: count for row, count in enumerate(counts) if count >= 0}


def _logprobs(
    raw_NV: torch.Tensor, token_B: torch.Tensor, asking: dict[int, int]
) -> list[TokenLogprobs | None]:
    token_N = token_B[list(asking)].clamp(min=0)  # an invalid row's are thrown away with it
    result: list[TokenLogprobs | None] = [None] * len(token_B)
    for row, found in zip(
        asking, token_logprobs(raw_NV, token_N, list(asking.values())), strict=True
    ):
        result[row] = found
    return result
