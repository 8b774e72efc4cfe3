"""Drafts of a sequence that the device may still compute: what stands for them in a step, and their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self


@dataclass(eq=False, slots=True)  # Not frozen: one is made for each sequence of a step.
class Drafts:
    """Tokens that may follow a sequence.

    references  of each draft its token, or the number by which a forward finds it on the device, see InputBatch
    read        returns the tokens; it waits for the device
    """

    references: tuple[int, ...]
    read: Callable[[], tuple[int, ...]]

    @classmethod
    def known(cls, token_ids: tuple[int, ...]) -> Self:
        """Return drafts that the host has."""
        return cls(token_ids, lambda: token_ids)

    def __len__(self) -> int:
        return len(self.references)
