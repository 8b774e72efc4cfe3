"""Prompts that no cache has seen: random token ids, or random letters and words as text.

The same seed gives every server the same prompts. Knows nothing of how they are sent.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

Prompt = list[int] | str


@dataclass(frozen=True)
class TextLength:
    """How many tokens a server makes of a text: overhead (chat template) + rate * letters."""

    overhead: float
    tokens_per_letter: float

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int]]) -> "TextLength":
        """From two measurements (letters, prompt tokens) of unlike length."""
        (letters_a, tokens_a), (letters_b, tokens_b) = samples
        rate = (tokens_b - tokens_a) / (letters_b - letters_a)
        return cls(tokens_a - rate * letters_a, max(rate, 1e-3))

    def letters_for(self, num_tokens: int) -> int:
        """Letters of a text that comes to about `num_tokens`; at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_letter))


def random_text(num_letters: int, source: random.Random) -> str:
    """Words of 2 to 9 small letters, cut to exactly `num_letters` characters (spaces included)."""
    words: list[str] = []
    length = 0
    while length <= num_letters:
        word = "".join(source.choices(string.ascii_lowercase, k=source.randint(2, 9)))
        words.append(word)
        length += len(word) + 1
    text = " ".join(words)[:num_letters]
    return text[:-1] + "x" if text.endswith(" ") else text


def random_ids(num_tokens: int, vocab_size: int, source: random.Random) -> list[int]:
    """Token ids below `vocab_size`."""
    return source.choices(range(vocab_size), k=num_tokens)


def prompt_source(seed: int, round_index: int, index: int) -> random.Random:
    """Random numbers of one request; rounds differ, or a prefix cache would answer the second one."""
    return random.Random(f"{seed}/{round_index}/{index}")
