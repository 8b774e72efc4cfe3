"""Drafts of a step that the device may still compute: what stands for them in the next step, and their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may follow the sequences of a step, by the index of a sequence in its batch.

    references  of each draft its token, or the number by which a forward finds it on the device, see InputBatch; () for
                a sequence without drafts
    read        returns the tokens of one sequence; it waits for the device
    """

    references: list[tuple[int, ...]]
    read: Callable[[int], tuple[int, ...]]

    @classmethod
    def known(cls, token_ids: list[tuple[int, ...]]) -> Self:
        """Return drafts that the host has."""
        return cls(token_ids, token_ids.__getitem__)
