"""Drafts by a draft model, which runs behind each step: a head for multi-token prediction, or EAGLE-3.

The runner computes the drafts on the device; here they wait for the next step of their sequence, which is launched
before the host has their tokens.
"""

from typing import NamedTuple

from workers.speculation.drafter import Drafter, Guesses
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence

NO_GUESSES = Guesses(0, 0)


class Waiting(NamedTuple):
    """Drafts that follow the first `num_tokens` tokens of a sequence."""

    num_tokens: int
    drafts: Drafts


class ModelDrafter(Drafter):
    """The last drafts of each sequence."""

    name = "model"

    def __init__(self) -> None:
        self._waiting: dict[Sequence, Waiting] = {}

    def drafted(self, seq: Sequence, drafts: Drafts) -> None:
        self._waiting[seq] = Waiting(len(seq.token_ids), drafts)

    def committed(self, seq: Sequence, verified: tuple[int, int]) -> Guesses:
        before = self._waiting.pop(seq, None)
        known = len(seq.token_ids)
        if before is None or before.num_tokens >= known:
            return NO_GUESSES
        accepted, drafted = verified
        if drafted == len(before.drafts):
            return Guesses(accepted, int(accepted < drafted))
        tokens, right = seq.token_ids[before.num_tokens :], 0
        for token, draft in zip(tokens, before.drafts.read(), strict=False):
            if token != draft:
                return Guesses(right, 1)
            right += 1
        return Guesses(right, 0)

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        waiting = self._waiting.get(seq)
        if waiting is None or waiting.num_tokens != len(seq.token_ids):
            return ()
        drafts = waiting.drafts
        return (drafts.references if seq.grammar is None else drafts.read())[:most]

    def has_drafts(self, seq: Sequence) -> bool:
        waiting = self._waiting.get(seq)
        return waiting is not None and len(waiting.drafts) > 0

    def forget(self, seq: Sequence) -> None:
        self._waiting.pop(seq, None)
