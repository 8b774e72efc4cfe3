"""What each request of a round asks for: random prompts, shared prefixes, or the lines of a file.

Pure: (seed, round, number of the request) decide, so that all servers are asked the same.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.lengths import Lengths
from cluster.bench.prompts import Prompt, TextLength, prompt_source, random_ids, random_text
from cluster.bench.prompts_file import Messages, Record
from cluster.bench.settings import Load


@dataclass(frozen=True)
class Ask:
    """One request: a prompt or a chat, and the length of the answer."""

    prompt: Prompt | Messages
    max_tokens: int


def make_asks(
    load: Load,
    records: Sequence[Record],
    text_length: TextLength | None,
    round_index: int,
    num_requests: int,
) -> list[Ask]:
    """The requests of a round. `text_length` None: random prompts are token ids."""
    if records:
        return _from_file(load, records, round_index, num_requests)
    groups = _groups(load, round_index, num_requests)
    input_lens, output_lens = Lengths.parse(load.input_len), Lengths.parse(load.output_len)
    prefixes = _prefixes(load, text_length, round_index)
    asks = []
    for index in range(num_requests):
        source = prompt_source(load.seed, round_index, index)
        num_tokens, max_tokens = input_lens.sample(source), output_lens.sample(source)
        prompt: Prompt
        if text_length is None:
            prompt = random_ids(num_tokens, load.vocab_size, source)
        else:
            prompt = random_text(text_length.letters_for(num_tokens), source)
        if prefixes:
            prompt = _join(prefixes[groups[index]], prompt)
        asks.append(Ask(prompt, max_tokens))
    return asks


def _from_file(
    load: Load, records: Sequence[Record], round_index: int, num_requests: int
) -> list[Ask]:
    """Each round goes on where the one before ended, and from the end of the file to its start.

    The warm-up (round -1) takes the last lines, so as not to warm a prefix cache for round 0.
    """
    output_lens = Lengths.parse(load.output_len)
    asks = []
    for index in range(num_requests):
        record = records[(round_index * num_requests + index) % len(records)]
        source = prompt_source(load.seed, round_index, index)
        prompt: Prompt | Messages
        if record.messages is not None:
            prompt = record.messages
        else:
            assert record.prompt is not None
            prompt = record.prompt
        asks.append(Ask(prompt, record.max_tokens or output_lens.sample(source)))
    return asks


def _prefixes(load: Load, text_length: TextLength | None, round_index: int) -> list[Prompt]:
    """New in every round: with those of the round before, all rounds but the first meet a warm cache."""
    prefixes: list[Prompt] = []
    for group in range(load.prefix_groups):
        source = random.Random(f"{load.seed}/{round_index}/prefix {group}")
        if text_length is None:
            prefixes.append(random_ids(load.prefix_tokens, load.vocab_size, source))
        else:
            num_letters = max(1, round(load.prefix_tokens / text_length.tokens_per_letter))
            prefixes.append(random_text(num_letters, source))
    return prefixes


def _groups(load: Load, round_index: int, num_requests: int) -> list[int]:
    """The group of each request: all as often as one another, in random order."""
    groups = [index % max(load.prefix_groups, 1) for index in range(num_requests)]
    random.Random(f"{load.seed}/{round_index}/groups").shuffle(groups)
    return groups


def _join(prefix: Prompt, tail: Prompt) -> Prompt:
    if isinstance(prefix, str) or isinstance(tail, str):
        return f"{prefix} {tail}"
    return prefix + tail
