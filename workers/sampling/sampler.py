"""From logits to tokens for the running sequences, with all their sampling parameters. Knows no model.

A batch without logits processors and log-probabilities goes straight to `sample_tokens`.

B rows, N rows with log-probabilities, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.sampling.logits_processors import LogitsProcessors
from workers.sampling.logprobs import LogprobTensors, ToHost, token_logprobs
from workers.sampling.token_bitmask import TokenBitmask
from workers.sampling.token_sampling import SamplingTable, sample_tokens
from workers.sampling.verified_rows import VerifiedRows
from workers.step.sequence import InputBatch, Sequence
from workers.wire.request import TokenLogprobs


@dataclass(frozen=True)
class SampledTokens:
    """A token for each row of a batch, and log-probabilities of some rows.

    token_B        int64, a number of `workers.sampling.no_token` where no token could be drawn
    logprobs_rows  indices of the rows with log-probabilities
    """

    token_B: torch.Tensor
    logprobs_rows: list[int]
    logprobs: LogprobTensors | None = None

    def to(self, copy: ToHost) -> "SampledTokens":
        """Return a copy with tensors copied by `copy`."""
        logprobs = None if self.logprobs is None else self.logprobs.to(copy)
        return SampledTokens(copy(self.token_B), self.logprobs_rows, logprobs)

    def entries(self) -> list[TokenLogprobs | None] | None:
        """Return the log-probabilities of the tokens: None for rows without, None if no row has any."""
        if self.logprobs is None:
            return None
        found: list[TokenLogprobs | None] = [None] * len(self.token_B)
        for row, logprobs in zip(self.logprobs_rows, self.logprobs.lists(), strict=True):
            found[row] = logprobs
        return found


class Sampler:
    """Parameters and state of the running sequences by slot: their row in the InputBatch."""

    def __init__(self, table: InputBatch, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._table = table
        self._device = device
        self._sampling = SamplingTable(max_num_seqs)
        self._processors = LogitsProcessors(max_num_seqs, vocab_size, device)
        self._num_logprobs: dict[int, int] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row: for the first time, or again after it was preempted."""
        params, num_prompt = seq.request.params, len(seq.request.prompt_token_ids)
        prompt, output = seq.token_ids[:num_prompt], seq.token_ids[num_prompt:]
        self._sampling.set(seq.row, params)
        self._processors.set(seq.row, params, prompt, output)
        seq.needs_last_token = seq.grammar is not None or self._processors.needs_last_token(params)
        self._num_logprobs.pop(seq.row, None)
        if params.logprobs is not None:
            self._num_logprobs[seq.row] = params.logprobs

    def reads_tokens(self, slots_B: np.ndarray) -> bool:
        """Return whether draws of these slots may read tokens of their sequences, drafts before them among them."""
        return self._processors.any_of(slots_B)

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots_B: np.ndarray,
        positions_B: np.ndarray,
        mask: TokenBitmask | None = None,
        draft_B: np.ndarray | None = None,
    ) -> SampledTokens:
        """Draw a token for each row, and compute the log-probabilities of rows that want them.

        The float32 logits are overwritten. A slot comes once for each of its rows. positions_B int64: position of each
        new token. draft_B: see ScheduledBatch.draft_token_ids; they are tokens where `reads_tokens`. Does not wait for
        the device.
        """
        num_logprobs = self._num_logprobs_of(slots_B)
        rows_N = to_device(np.array(list(num_logprobs)), self._device) if num_logprobs else None
        raw_NV = None if rows_N is None else logits_BV.index_select(0, rows_N)
        if mask is not None:
            mask.apply(logits_BV)
        processors, drafts = self._processors.batch(slots_B), None
        if processors is not None:
            drafts = None if draft_B is None else VerifiedRows.of(slots_B, draft_B)
            self._processors.apply(
                logits_BV, processors, positions_B, self._table.token_ids, drafts
            )
        token_B = sample_tokens(logits_BV, self._sampling.batch(slots_B, positions_B))
        if processors is not None:
            self._processors.count_tokens(token_B, processors, drafts)
        if rows_N is None or raw_NV is None:
            return SampledTokens(token_B, [])
        # The log-probabilities of an invalid row are dropped with the row.
        token_N = token_B.index_select(0, rows_N).clamp_(min=0)
        logprobs = token_logprobs(raw_NV, token_N, list(num_logprobs.values()))
        return SampledTokens(token_B, list(num_logprobs), logprobs)

    def _num_logprobs_of(self, slots_B: np.ndarray) -> dict[int, int]:
        """Return the rows with log-probabilities, and their number of tokens beside the token drawn."""
        if not self._num_logprobs:
            return {}
        counts = (self._num_logprobs.get(slot, -1) for slot in slots_B.tolist())
        return {row: count for row, count in enumerate(counts) if count >= 0}
