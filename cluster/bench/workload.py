"""Plans the requests of a round: random prompts, shared prefixes, or the lines of a file.

Pure: (seed, round, number of the request) decide, so that all servers get equal requests.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.bench.lengths import Lengths
from cluster.bench.prompts import Prompt, TextLength, prompt_source, random_ids, random_text
from cluster.bench.prompts_file import Messages, Record
from cluster.bench.settings import Load


@dataclass(frozen=True)
class PlannedRequest:
    """One request: a prompt or a chat, and the length of the answer; `model` None: the server's own."""

    prompt: Prompt | Messages
    max_tokens: int
    model: str | None = None


def plan_requests(
    load: Load,
    records: Sequence[Record],
    text_length: TextLength | None,
    round_index: int,
    num_requests: int,
) -> list[PlannedRequest]:
    """Return the requests of a round. `text_length` None: random prompts are token ids."""
    if records:
        planned = _from_file(load, records, round_index, num_requests)
    else:
        planned = _random(load, text_length, round_index, num_requests)
    models = load.models or (None,)
    return [replace(it, model=models[i % len(models)]) for i, it in enumerate(planned)]


def _random(
    load: Load, text_length: TextLength | None, round_index: int, num_requests: int
) -> list[PlannedRequest]:
    groups = _groups(load, round_index, num_requests)
    input_lens, output_lens = Lengths.parse(load.input_len), Lengths.parse(load.output_len)
    prefixes = _prefixes(load, text_length, round_index)
    planned = []
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
        planned.append(PlannedRequest(prompt, max_tokens))
    return planned


def _from_file(
    load: Load, records: Sequence[Record], round_index: int, num_requests: int
) -> list[PlannedRequest]:
    """Take the lines behind those of the round before; behind the last line comes the first.

    The warm-up (round -1) takes the last lines, so that it fills no prefix cache for round 0.
    """
    output_lens = Lengths.parse(load.output_len)
    planned = []
    for index in range(num_requests):
        record = records[(round_index * num_requests + index) % len(records)]
        source = prompt_source(load.seed, round_index, index)
        prompt: Prompt | Messages
        if record.messages is not None:
            prompt = record.messages
        else:
            assert record.prompt is not None
            prompt = record.prompt
        planned.append(PlannedRequest(prompt, record.max_tokens or output_lens.sample(source)))
    return planned


def _prefixes(load: Load, text_length: TextLength | None, round_index: int) -> list[Prompt]:
    """Make new prefixes for every round, because repeated prefixes would find a warm cache."""
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
    """Return the group of each request: all groups equally often, in random order."""
    groups = [index % max(load.prefix_groups, 1) for index in range(num_requests)]
    random.Random(f"{load.seed}/{round_index}/groups").shuffle(groups)
    return groups


def _join(prefix: Prompt, tail: Prompt) -> Prompt:
    if isinstance(prefix, str) or isinstance(tail, str):
        return f"{prefix} {tail}"
    return prefix + tail
