"""Makes prompts that no prefix cache holds: random token ids, or random words as text.

The same seed gives every server the same prompts. Knows nothing of how they are sent.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

Prompt = list[int] | str


@dataclass(frozen=True)
class TextLength:
    """Estimates the tokens of a text in a server: overhead of the chat template + rate * letters."""

    overhead: float
    tokens_per_letter: float

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int]]) -> "TextLength":
        """Fit two measurements (letters, prompt tokens) of different length."""
        (letters_a, tokens_a), (letters_b, tokens_b) = samples
        rate = (tokens_b - tokens_a) / (letters_b - letters_a)
        return cls(tokens_a - rate * letters_a, max(rate, 1e-3))

    def letters_for(self, num_tokens: int) -> int:
        """Return the letters of a text of about `num_tokens` tokens; at least 1."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_letter))


def random_text(num_letters: int, source: random.Random) -> str:
    """Return words of 2 to 9 lower-case letters, cut to exactly `num_letters` characters, spaces included."""
    words: list[str] = []
    length = 0
    while length <= num_letters:
        word = "".join(source.choices(string.ascii_lowercase, k=source.randint(2, 9)))
        words.append(word)
        length += len(word) + 1
    text = " ".join(words)[:num_letters]
    return text[:-1] + "x" if text.endswith(" ") else text


def random_ids(num_tokens: int, vocab_size: int, source: random.Random) -> list[int]:
    """Return random token ids below `vocab_size`."""
    return source.choices(range(vocab_size), k=num_tokens)


def prompt_source(seed: int, round_index: int, index: int) -> random.Random:
    """Return the random source of one request. Rounds differ, because a prefix cache would serve a repeated prompt."""
    return random.Random(f"{seed}/{round_index}/{index}")
