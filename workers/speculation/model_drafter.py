"""Drafts by a draft model, which runs behind each step: a head for multi-token prediction, or EAGLE-3.

The runner computes the drafts on the device; here they wait for the next step of their sequence, which is launched
before the host has their tokens.
"""

import sys
from functools import cache

from workers.speculation.drafter import Drafter, Guesses
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence

NO_GUESSES = Guesses(0, 0)
NOTHING = sys.maxsize, Drafts.known(())


class ModelDrafter(Drafter):
    """The last drafts of each sequence."""

    name = "model"

    def __init__(self) -> None:
        # Of each sequence, how many tokens it had, and the drafts that follow them.
        self._waiting: dict[Sequence, tuple[int, Drafts]] = {}

    def drafted(self, seq: Sequence, drafts: Drafts) -> None:
        self._waiting[seq] = len(seq.token_ids), drafts

    def committed(self, seq: Sequence, verified: tuple[int, int]) -> Guesses:
        num_tokens, drafts = self._waiting.pop(seq, NOTHING)
        if num_tokens >= len(seq.token_ids):
            return NO_GUESSES
        if verified[1] == len(drafts.references):
            return _counted(*verified)
        tokens, right = seq.token_ids[num_tokens:], 0
        for token, draft in zip(tokens, drafts.read(), strict=False):
            if token != draft:
                return Guesses(right, 1)
            right += 1
        return Guesses(right, 0)

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        num_tokens, drafts = self._waiting.get(seq, NOTHING)
        if num_tokens != len(seq.token_ids):
            return ()
        return (drafts.references if seq.grammar is None else drafts.read())[:most]

    def has_drafts(self, seq: Sequence) -> bool:
        return len(self._waiting.get(seq, NOTHING)[1]) > 0

    def could_draft(self, seq: Sequence) -> bool:
        return True

    def forget(self, seq: Sequence) -> None:
        self._waiting.pop(seq, None)


@cache
def _counted(accepted: int, drafted: int) -> Guesses:
    return Guesses(accepted, int(accepted < drafted))
