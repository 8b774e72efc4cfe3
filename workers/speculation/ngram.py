"""Drafts by copying: what stood behind the last tokens where they stood before, in the prompt, answer or prediction.

A sequence's text is its prompt, its request's prediction and its output. The drafter follows one earlier place in it
as long as the output equals the text there; otherwise it looks for the last place where the last NGRAM tokens stand,
and without one passes over one wrong token.
The host does it alone, in constant time a token.
"""

import numpy as np

from workers.speculation.drafter import NO_GUESSES, Drafter, Guesses, NewTokens
from workers.step.sequence import Sequence

NGRAM = 3
"""Tokens by which a place is found. Fewer tokens find more places; behind an edit, more tokens find one later."""

MAX_INDEXED = 1 << 17
"""Last tokens of prompt and prediction that are searched, which bounds the time to sort them, once for a request."""

_BITS = 21
_LIMIT = 1 << _BITS  # ids of all vocabularies are below it


class NGramDrafter(Drafter):
    """Copies of earlier text."""

    name = "ngram"

    def __init__(self) -> None:
        self._texts: dict[Sequence, Text] = {}

    def committed(self, new: NewTokens) -> list[Guesses]:
        return [self._read(seq) for seq in new.seqs]

    def _read(self, seq: Sequence) -> Guesses:
        text = self._texts.get(seq)
        if text is None:
            self._texts[seq] = Text.of(seq)
            return NO_GUESSES
        return text.extend(seq.token_ids[text.num_read :])

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        text = self._texts.get(seq)
        return () if text is None else text.copy(most)

    def has_drafts(self, seq: Sequence) -> bool:
        text = self._texts.get(seq)
        return text is not None and text.place is not None

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)


class Text:
    """The text of one sequence, and the place in it that the sequence follows.

    num_read   tokens of the sequence that were read
    place      index of the token that is guessed next; None: the last tokens stand nowhere else
    """

    def __init__(self, given: list[int], context: list[int]):
        """`given` is searched; the output begins behind `context`, which stands at the end of the prompt."""
        self.num_read = 0
        self.place: int | None = None
        self._tokens = given
        self._keys, self._ends = _index(given)
        self._added: dict[
            int, int
        ] = {}  # by key of an n-gram of the output: index of the token behind it
        self._last = context[-(NGRAM - 1) :]
        self._num_right = 0  # guesses since the last wrong guess

    @classmethod
    def of(cls, seq: Sequence) -> "Text":
        """Return the text of a sequence, with its output so far."""
        request = seq.request
        num_prompt = len(request.prompt_token_ids)
        given = [*request.prompt_token_ids, *request.params.prediction_token_ids][-MAX_INDEXED:]
        text = cls(given, request.prompt_token_ids)
        text.extend(seq.token_ids[num_prompt:])
        text.num_read = len(seq.token_ids)
        return text

    def extend(self, token_ids: list[int]) -> Guesses:
        """Append tokens of the output; return how many of them were guessed, and guessed wrong."""
        right = wrong = 0
        tokens, last = self._tokens, self._last
        for token in token_ids:
            place = self.place
            hit = place is not None and tokens[place] == token
            right += hit
            wrong += place is not None and not hit
            tokens.append(token)
            last.append(token)
            found = None
            if len(last) == NGRAM:
                key = (last[0] << 2 * _BITS) | (last[1] << _BITS) | last[2]
                found = None if hit else self._find(key)
                self._added[key] = len(tokens)
                del last[0]
            # One token may have been replaced, where nothing better is known.
            goes_on = hit or (found is None and self._num_right >= NGRAM)
            self.place = place + 1 if goes_on and place is not None else found
            self._num_right = self._num_right + 1 if hit else 0
        self.num_read += len(token_ids)
        return Guesses(right, wrong)

    def copy(self, count: int) -> tuple[int, ...]:
        """Return up to `count` tokens from `place` on; behind the end of the text they repeat."""
        if self.place is None or count < 1:
            return ()
        copied = self._tokens[self.place : self.place + count]
        while len(copied) < count:
            copied += copied[: count - len(copied)]
        return tuple(copied)

    def _find(self, key: int) -> int | None:
        """Return the index of the token behind the last place of an n-gram."""
        if (added := self._added.get(key)) is not None:
            return added
        index = int(self._keys.searchsorted(key, side="right")) - 1
        if index < 0 or self._keys[index] != key:
            return None
        return int(self._ends[index])


def _index(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of all n-grams of a text that a token follows, sorted, and the indices of these tokens."""
    ids = np.array(tokens, dtype=np.int64)
    assert ids.max(initial=0) < _LIMIT, f"token {ids.max()} does not fit in {_BITS} bits"
    keys = (ids[:-3] << 2 * _BITS) | (ids[1:-2] << _BITS) | ids[2:-1]
    order = keys.argsort(kind="stable")
    return keys[order], order + NGRAM
