"""Drafts by a draft model, which runs behind each step: a head for multi-token prediction, or EAGLE-3.

The runner computes the drafts on the device; here they wait for the next step of their sequence, which is launched
before the host has their tokens.
"""

import sys
from collections.abc import Iterator
from functools import cache
from itertools import repeat

from workers.speculation.drafter import NO_GUESSES, Drafter, Guesses, NewTokens
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence

# Of a sequence, how many tokens it had, the references to the drafts that follow them, and their place: the drafts of
# the step, and the index in them. No class, because one is made for each sequence of a step.
Waiting = tuple[int, tuple[int, ...], Drafts, int]
NOTHING: Waiting = (sys.maxsize, (), Drafts.known([()]), 0)


class ModelDrafter(Drafter):
    """The last drafts of each sequence."""

    name = "model"

    def __init__(self) -> None:
        self._waiting: dict[Sequence, Waiting] = {}

    def drafted(self, new: NewTokens, drafts: Drafts) -> None:
        references, waiting = drafts.references, self._waiting
        for seq, index in zip(new.seqs, new.indices, strict=True):
            if references[index]:
                waiting[seq] = len(seq.token_ids), references[index], drafts, index

    def committed(self, new: NewTokens) -> Iterator[Guesses]:
        before = list(map(self._waiting.pop, new.seqs, repeat(NOTHING)))
        ends = [len(seq.token_ids) for seq in new.seqs]
        return map(_compared, new.seqs, before, ends, new.accepted, new.verified)

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        num_tokens, references, drafts, index = self._waiting.get(seq, NOTHING)
        if num_tokens != len(seq.token_ids):
            return ()
        return (references if seq.grammar is None else drafts.read(index))[:most]

    def has_drafts(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def forget(self, seq: Sequence) -> None:
        self._waiting.pop(seq, None)


def _compared(seq: Sequence, waiting: Waiting, end: int, accepted: int, verified: int) -> Guesses:
    """Return the guesses of drafts that waited for the tokens up to number `end`; the others as in NewTokens."""
    num_tokens, references, drafts, index = waiting
    if num_tokens >= end:
        return NO_GUESSES
    if verified == len(references):
        return _counted(accepted, verified)
    right = 0
    for token, draft in zip(seq.token_ids[num_tokens:end], drafts.read(index), strict=False):
        if token != draft:
            return Guesses(right, 1)
        right += 1
    return Guesses(right, 0)


@cache
def _counted(accepted: int, drafted: int) -> Guesses:
    return Guesses(accepted, int(accepted < drafted))
