"""From logits to tokens for the running sequences, with all that their parameters ask for. Knows no model.

A batch in which nobody asks for edits or log-probabilities goes straight to the sampler.

B rows, N rows that want log-probabilities, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.sequence import Sequence, SequenceTable
from workers.runner.host_copy import to_device
from workers.sampling.draw import SamplingTable, sample
from workers.sampling.logits_processors import GrammarBitmask, LogitsProcessors
from workers.sampling.logprobs import LogprobTensors, ToHost, token_logprobs
from workers.wire.request import TokenLogprobs


@dataclass(frozen=True)
class Picked:
    """A token for each row of a batch, and log-probabilities of those in the rows `asking`.

    token_B   int64, -1 where logits are not finite
    """

    token_B: torch.Tensor
    asking: list[int]
    logprobs: LogprobTensors | None = None

    def to(self, copy: ToHost) -> "Picked":
        """The same, elsewhere."""
        logprobs = None if self.logprobs is None else self.logprobs.to(copy)
        return Picked(copy(self.token_B), self.asking, logprobs)

    def lists(self) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """The tokens, and one log-probability for each, None for rows that did not ask; None when none did."""
        if self.logprobs is None:
            return self.token_B.tolist(), None
        found: list[TokenLogprobs | None] = [None] * len(self.token_B)
        for row, logprobs in zip(self.asking, self.logprobs.lists(), strict=True):
            found[row] = logprobs
        return self.token_B.tolist(), found


class Sampler:
    """Parameters and state of the running sequences by their row in the SequenceTable, here called slot."""

    def __init__(
        self, table: SequenceTable, max_num_seqs: int, vocab_size: int, device: torch.device
    ):
        self._table = table
        self._device = device
        self._sampling = SamplingTable(max_num_seqs)
        self._edits = LogitsProcessors(max_num_seqs, vocab_size, device)
        self._num_logprobs: dict[int, int] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row: for the first time, or again after it was preempted."""
        params, num_prompt = seq.request.params, len(seq.request.prompt_token_ids)
        self._sampling.set(seq.row, params)
        self._edits.set(seq.row, params, seq.token_ids[:num_prompt], seq.token_ids[num_prompt:])
        seq.needs_last_token = seq.grammar is not None or self._edits.reads_tokens(params)
        self._num_logprobs.pop(seq.row, None)
        if params.logprobs is not None:
            self._num_logprobs[seq.row] = params.logprobs

    def pick(
        self,
        logits_BV: torch.Tensor,
        slots_B: np.ndarray,
        positions_B: np.ndarray,
        mask: GrammarBitmask | None = None,
    ) -> Picked:
        """Draw a token for each row, and look up the log-probabilities of those that ask for any.

        float32 logits, which are overwritten; positions int64, where each new token will stand. Does not wait for the
        device.
        """
        asking = self._asking(slots_B)
        rows_N = to_device(np.array(list(asking)), self._device) if asking else None
        raw_NV = None if rows_N is None else logits_BV.index_select(0, rows_N)
        if mask is not None:
            mask.apply(logits_BV)
        edits = self._edits.of(slots_B)
        if edits is not None:
            self._edits.apply(logits_BV, edits, positions_B, self._table.token_ids)
        token_B = sample(logits_BV, self._sampling.batch(slots_B, positions_B))
        if edits is not None:
            self._edits.drawn(token_B, edits)
        if rows_N is None or raw_NV is None:
            return Picked(token_B, [])
        # An invalid row's are thrown away with it.
        token_N = token_B.index_select(0, rows_N).clamp_(min=0)
        return Picked(token_B, list(asking), token_logprobs(raw_NV, token_N, list(asking.values())))

    def _asking(self, slots_B: np.ndarray) -> dict[int, int]:
        """Rows that want log-probabilities, and how many tokens beside the one drawn."""
        if not self._num_logprobs:
            return {}
        counts = (self._num_logprobs.get(slot, -1) for slot in slots_B.tolist())
        return {row: count for row, count in enumerate(counts) if count >= 0}
