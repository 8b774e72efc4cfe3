"""Token sequences that an output may not contain: the last token of a word is forbidden after its other tokens.

As in vLLM, a word matches output tokens only, not the prompt. Knows nothing of text or the model.

B rows, N words of a batch, P tokens of the longest prefix (a word without its last token), S slots, L positions.
"""

from dataclasses import dataclass

import numpy as np

_ANY = -1  # fills short prefixes on the left


@dataclass(frozen=True)
class BadWords:
    """The words of a batch's rows, on the host.

    rows_N, slots_N   int64, row in the batch and slot of the row
    starts_N          int64, position of the first output token of the row
    prefixes_NP       int64, padded with -1 on the left
    last_N            int64, last token of each word
    """

    rows_N: np.ndarray
    slots_N: np.ndarray
    starts_N: np.ndarray
    prefixes_NP: np.ndarray
    last_N: np.ndarray

    def find(
        self, positions_B: np.ndarray, token_ids_SL: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens, int64 [M] each, that are forbidden now.

        positions_B   position of each row's new token
        token_ids_SL  tokens of each slot; all tokens before that position are known
        """
        num_prefix = self.prefixes_NP.shape[1]
        positions_NP = positions_B[self.rows_N, None] + np.arange(-num_prefix, 0)
        known_NP = token_ids_SL[self.slots_N[:, None], positions_NP.clip(min=0)]
        in_output_NP = positions_NP >= self.starts_N[:, None]
        equal_NP = (known_NP == self.prefixes_NP) & in_output_NP
        matches_N = (equal_NP | (self.prefixes_NP == _ANY)).all(axis=1)
        return self.rows_N[matches_N], self.last_N[matches_N]


class BadWordsTable:
    """Bad words of the running sequences by slot."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._by_slot: dict[int, tuple[int, list[tuple[int, ...]]]] = {}

    def set(self, slot: int, words: tuple[tuple[int, ...], ...], start: int) -> None:
        """A sequence moves into `slot`; its output begins at position `start`.

        Words with a token beyond the vocabulary are left out, because the model cannot draw that token.
        """
        known = [w for w in words if w and all(0 <= token < self._vocab_size for token in w)]
        self._by_slot.pop(slot, None)
        if known:
            self._by_slot[slot] = start, known

    def batch(self, slots: list[int]) -> BadWords | None:
        """Return the words of a batch with rows in `slots`; None if there are none."""
        found = [
            (row, slot, start, word)
            for row, slot in enumerate(slots)
            if slot in self._by_slot
            for start, words in (self._by_slot[slot],)
            for word in words
        ]
        if not found:
            return None
        rows, of_slots, starts, words = zip(*found, strict=True)
        longest = max(map(len, words)) - 1
        prefixes_NP = np.full((len(words), longest), _ANY, dtype=np.int64)
        for index, word in enumerate(words):
            prefixes_NP[index, longest + 1 - len(word) :] = word[:-1]
        last = [word[-1] for word in words]
        as_ints = [np.array(numbers, dtype=np.int64) for numbers in (rows, of_slots, starts, last)]
        return BadWords(as_ints[0], as_ints[1], as_ints[2], prefixes_NP, as_ints[3])
