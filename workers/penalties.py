"""Presence, frequency and repetition penalties on the logits of rows. Knows nothing of requests or the model.

Which tokens a sequence has is kept per slot on the device: written when a sequence moves in, then one entry a
token. Counting a long sequence again in every step would cost more than the forward of a small model.

P penalised rows, V vocabulary, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.request import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three does anything."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


@dataclass(frozen=True)
class PenalisedRows:
    """The P rows of a batch that have penalties, on the device.

    rows_P         int64, where they are in the batch
    slots_P        int64, where their tokens are counted
    values_3P1     float32: presence, frequency, repetition
    """

    rows_P: torch.Tensor
    slots_P: torch.Tensor
    values_3P1: torch.Tensor


class Penalties:
    """Penalties and token counts by slot. The memory grows with the highest slot that uses any."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._values: dict[int, tuple[float, float, float]] = {}
        # int32 [S, V]: twice the count in the output, plus 1 when the prompt has the token.
        self._seen_SV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def set(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """A sequence moves into `slot`, with what it has generated so far."""
        self._values.pop(slot, None)
        if not has_penalties(params):
            return
        self._values[slot] = (
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        self._grow(slot + 1)
        seen_V = self._seen_SV[slot].zero_()
        seen_V.index_fill_(0, self._ids(prompt), 1)
        output_ids = self._ids(output)
        seen_V.index_add_(0, output_ids, torch.full_like(output_ids, 2, dtype=torch.int32))

    def rows(self, slots: list[int]) -> PenalisedRows | None:
        """Those of a batch's rows that have penalties; `slots` has each row's slot."""
        penalised = [(row, slot) for row, slot in enumerate(slots) if slot in self._values]
        if not penalised:
            return None
        values_P3 = torch.tensor([self._values[slot] for _, slot in penalised])
        return PenalisedRows(
            self._ids([row for row, _ in penalised]),
            self._ids([slot for _, slot in penalised]),
            values_P3.T.unsqueeze(2).to(self._device),
        )

    def apply(self, logits_BV: torch.Tensor, which: PenalisedRows) -> None:
        """Penalise float32 logits in place: repetition first, then frequency and presence."""
        presence_P1, frequency_P1, repetition_P1 = which.values_3P1
        seen_PV = self._seen_SV[which.slots_P]
        logits_PV = logits_BV[which.rows_P]
        smaller_PV = torch.where(
            logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1
        )
        logits_PV = torch.where(seen_PV > 0, smaller_PV, logits_PV)
        count_PV = seen_PV >> 1
        logits_PV -= frequency_P1 * count_PV
        logits_PV -= presence_P1 * (count_PV > 0)
        logits_BV.index_copy_(0, which.rows_P, logits_PV)

    def count(self, token_B: torch.Tensor, which: PenalisedRows) -> None:
        """The batch got `token_B`, int64; a negative one ends its sequence, so what it counts as does not matter."""
        self._seen_SV[which.slots_P, token_B[which.rows_P].clamp(min=0)] += 2

    def _grow(self, num_slots: int) -> None:
        have, vocab_size = self._seen_SV.shape
        if have < num_slots:
            more = min(max(num_slots, 2 * have), self._max_num_seqs) - have
            zeros = self._seen_SV.new_zeros(more, vocab_size)
            self._seen_SV = torch.cat((self._seen_SV, zeros))

    def _ids(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)
