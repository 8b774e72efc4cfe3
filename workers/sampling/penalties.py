"""Presence, frequency and repetition penalties on the logits of rows. Knows nothing of requests or the model.

The counts of a sequence's tokens are kept per slot on the device: written when a sequence moves in, then one entry per
new token. On a CPU only the logits of a sequence's own tokens are read, a small part of 152k logits.

P penalised rows, L tokens of the longest, V vocabulary, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.wire.request import SamplingParams


@dataclass(frozen=True)
class PenalisedRows:
    """The P rows of a batch that have penalties.

    rows, slots  values of rows_P1 and slots_P1, on the host
    rows_P1      int64, indices in the batch
    slots_P1     int64, slots of their token counts
    values_3P1   float32: presence, frequency, repetition
    """

    rows: list[int]
    slots: list[int]
    rows_P1: torch.Tensor
    slots_P1: torch.Tensor
    values_3P1: torch.Tensor

    def select(self, indices: np.ndarray) -> "PenalisedRows":
        """Return the rows of these indices, int64."""
        index = to_device(indices, self.rows_P1.device)
        return PenalisedRows(
            [self.rows[index] for index in indices],
            [self.slots[index] for index in indices],
            self.rows_P1[index],
            self.slots_P1[index],
            self.values_3P1[:, index],
        )


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
        """A sequence with the output so far moves into `slot`."""
        self._values.pop(slot, None)
        if not params.has_penalties:
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
        """Return the rows of a batch that have penalties; `slots` holds the slot of each row."""
        rows = [row for row, slot in enumerate(slots) if slot in self._values]
        if not rows:
            return None
        slots = [slots[row] for row in rows]
        values_P3 = np.array([self._values[slot] for slot in slots], dtype=np.float32)
        return PenalisedRows(
            rows,
            slots,
            self._ids(rows).unsqueeze(1),
            self._ids(slots).unsqueeze(1),
            to_device(values_P3, self._device).T.unsqueeze(2),
        )

    def apply(
        self, logits_BV: torch.Tensor, which: PenalisedRows, token_ids_PL: torch.Tensor
    ) -> None:
        """Penalise float32 logits in place: repetition first, then frequency and presence.

        token_ids_PL int64: all tokens of each row, in any order and number. Shorter rows may be filled with any token
        of the vocabulary, because the logit of a token that was not counted does not change.
        """
        presence_P1, frequency_P1, repetition_P1 = which.values_3P1
        seen_PL = self._seen_SV[which.slots_P1, token_ids_PL]
        logits_PL = logits_BV[which.rows_P1, token_ids_PL]
        repeated_PL = torch.where(
            logits_PL > 0, logits_PL / repetition_P1, logits_PL * repetition_P1
        )
        logits_PL = torch.where(seen_PL > 0, repeated_PL, logits_PL)
        count_PL = seen_PL >> 1
        logits_PL -= frequency_P1 * count_PL
        logits_PL -= presence_P1 * (count_PL > 0)
        # A token that a row holds twice is written twice, with one value.
        logits_BV[which.rows_P1, token_ids_PL] = logits_PL

    def apply_everywhere(self, logits_BV: torch.Tensor, which: PenalisedRows) -> None:
        """Penalise like `apply`; one kernel reads the counts of all tokens, because a GPU's host lacks new tokens."""
        from kernels.triton.penalise import penalise

        penalise(logits_BV, which.rows_P1, self._seen_SV, which.slots_P1, which.values_3P1)

    def count(
        self, token_B: torch.Tensor, which: PenalisedRows, times_B: torch.Tensor | None = None
    ) -> None:
        """Count the new tokens, int64. A negative token ends its sequence, so its count does not matter.

        times_B   int32: how often each counts; None: once, and a slot comes once
        """
        token_P1 = token_B[which.rows_P1].clamp(min=0)
        if times_B is None:
            self._seen_SV[which.slots_P1, token_P1] += 2
            return
        twice_P1 = 2 * times_B[which.rows_P1]
        self._seen_SV.index_put_((which.slots_P1, token_P1), twice_P1, accumulate=True)

    def _grow(self, num_slots: int) -> None:
        have, vocab_size = self._seen_SV.shape
        if have < num_slots:
            more = min(max(num_slots, 2 * have), self._max_num_seqs) - have
            zeros = self._seen_SV.new_zeros(more, vocab_size)
            self._seen_SV = torch.cat((self._seen_SV, zeros))

    def _ids(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(numbers, dtype=np.int64), self._device)
