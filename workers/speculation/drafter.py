"""A source of drafts: tokens that sequences may go on with. Knows nothing of schedules, acceptance and step times.

A drafter is a new subclass, made by `workers.speculation.speculator.make_speculator`. A drafter that errs costs time,
never a token: each draft is verified by the draw of the row before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from workers.step.drafts import Drafts
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import Sequence


class Guesses(NamedTuple):
    """Of the tokens that a sequence got, those that the drafter had guessed right, and wrong; drafted or not."""

    right: int
    wrong: int


NO_GUESSES = Guesses(0, 0)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The sequences that have got tokens in a step and go on, one entry of each list for each of them.

    indices    in the batch
    accepted   drafts that the step has accepted, of the drafts that it has verified:
    verified   0 where the step had none
    """

    seqs: list[Sequence]
    indices: list[int]
    accepted: list[int]
    verified: list[int]

    @classmethod
    def of(cls, batch: ScheduledBatch, counts: list[int], indices: list[int]) -> Self:
        """Return those of a step that has given `counts` tokens to the sequences of its batch; indices: rising."""
        seqs, num_logits = batch.seqs, batch.num_logits.tolist()
        if len(indices) < len(seqs):
            seqs = [seqs[at] for at in indices]
            counts = [counts[at] for at in indices]
            num_logits = [num_logits[at] for at in indices]
        return cls(seqs, indices, [count - 1 for count in counts], [num - 1 for num in num_logits])


class Drafter(ABC):
    """Drafts for the running sequences of one rank in one epoch."""

    name: ClassVar[str]

    @abstractmethod
    def committed(self, new: NewTokens) -> Iterable[Guesses]:
        """Read the new tokens of sequences; the first call for a sequence reads all its tokens.

        Return the guesses of each. They are read once, and late: what only they need is done as they are read.
        A guess counts if it was made of all tokens before it.
        """

    def drafted(self, new: NewTokens, drafts: Drafts) -> None:
        """Take the drafts of a draft model that follow the present tokens of sequences; other drafters have none."""
        raise NotImplementedError(f"{self.name} drafts by itself")

    @abstractmethod
    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that may follow seq.token_ids, or their references as in Drafts.

        A sequence with a grammar gets tokens.
        """

    @abstractmethod
    def has_drafts(self, seq: Sequence) -> bool:
        """Return whether `propose` would return tokens, by what `committed` has read."""

    @abstractmethod
    def forget(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""
