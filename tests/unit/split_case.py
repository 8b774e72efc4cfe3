"""A splitter of thoughts over a text that comes whole, character by character, and in random pieces."""

import random
from collections.abc import Callable, Iterator

from cluster.api.answer.reasoning import Splitter


def splits(make: Callable[[], Splitter], text: str) -> Iterator[list[str]]:
    """Yield the [reasoning, content] of each way in which the text comes."""
    rng = random.Random(text)
    for size in (len(text) or 1, 1, *[0] * 20):
        splitter = make()
        found, rest = ["", ""], text
        while rest:
            cut = size or rng.randint(1, 9)
            piece, rest = rest[:cut], rest[cut:]
            found = [a + b for a, b in zip(found, splitter.push(piece), strict=True)]
        yield [a + b for a, b in zip(found, splitter.flush(), strict=True)]
