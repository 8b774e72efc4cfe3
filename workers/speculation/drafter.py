"""A source of drafts: tokens that sequences may go on with. Knows nothing of schedules, acceptance and step times.

A drafter is a new subclass, made by `workers.speculation.speculator.make_speculator`. A drafter that errs costs time,
never a token: each draft is verified by the draw of the row before it.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from workers.step.drafts import Drafts
from workers.step.sequence import Sequence


class Guesses(NamedTuple):
    """Of the tokens that a sequence got, those that the drafter had guessed right, and wrong; drafted or not."""

    right: int
    wrong: int


class Drafter(ABC):
    """Drafts for the running sequences of one rank in one epoch."""

    name: ClassVar[str]

    @abstractmethod
    def committed(self, seq: Sequence, verified: tuple[int, int]) -> Guesses:
        """Read the tokens that `seq` has got since the last call; the first call reads all of them.

        A guess counts if it was made of all tokens before it.

        verified   accepted drafts, of so many that the step verified
        """

    def drafted(self, seq: Sequence, drafts: Drafts) -> None:
        """Take the drafts of a draft model that follow the present tokens of `seq`; other drafters have none."""
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
    def could_draft(self, seq: Sequence) -> bool:
        """Return whether `propose` could return tokens at the next step, if drafts of `seq` paid."""

    @abstractmethod
    def forget(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""
