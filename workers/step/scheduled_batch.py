"""The work of one step on one rank, from the scheduler to the runner. Plain data."""

from dataclasses import dataclass

import numpy as np

from workers.step.sequence import Sequence
from workers.step.step_sync import ForwardMode


@dataclass(frozen=True)
class ScheduledBatch:
    """Work of one step: `seqs[i]` computes `num_new_tokens[i]` tokens; the first num_decodes sequences compute one.

    samples[i]   sequence i reaches its last token in this step and gets a new token
    admitted     sequences that moved into their rows since the last launched step
    decodes_next a sequence with a new token may go on, and so decodes in the next step
    state_copies (source slot, target slot) of states of linear attention, to copy in this order before the forward
    """

    seqs: list[Sequence]
    num_new_tokens: np.ndarray
    num_tokens: int
    num_decodes: int
    samples: np.ndarray
    admitted: list[Sequence]
    decodes_next: bool = False
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Tokens of sequences that compute more than one."""
        return self.num_tokens - self.num_decodes

    @property
    def forward_mode(self) -> ForwardMode:
        """EXTEND, DECODE, MIXED or IDLE."""
        if not self.seqs:
            return ForwardMode.IDLE
        if self.num_decodes == len(self.seqs):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.num_decodes else ForwardMode.EXTEND
