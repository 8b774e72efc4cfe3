"""Readings of experts between ranks: each expert that comes is read once, and no rank is read twice in a batch."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from workers.rank.expert_transfers import Transfer, transfers


def random_map(draw: random.Random, starts: list[int], experts: int) -> list[int]:
    """Any map; some experts may have no slot, as where another host has them."""
    return [
        expert
        for start, end in pairwise(starts)
        for expert in draw.sample(range(experts), end - start)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_each_expert_comes_once_and_batches_are_matchings(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, experts = draw.randint(1, 8), draw.randint(8, 24)
    starts = [0]
    for _ in range(num_ranks):
        starts.append(starts[-1] + draw.randint(0, 8))
    hosts = [draw.randint(0, 1) for _ in range(num_ranks)]
    before, after = (random_map(draw, starts, experts) for _ in range(2))
    found = transfers(before, after, starts, hosts)
    held = [{*before[start:end]} for start, end in pairwise(starts)]
    wanted = [
        (rank, expert)
        for rank, (start, end) in enumerate(pairwise(starts))
        for expert in {*after[start:end]} - held[rank]
        if any(hosts[peer] == hosts[rank] and expert in held[peer] for peer in range(num_ranks))
    ]
    assert sorted((it.target, it.expert) for it in found) == sorted(wanted)
    for it in found:
        assert before[starts[it.source] + it.place] == it.expert
        assert hosts[it.source] == hosts[it.target] and it.source != it.target
    for end in ("source", "target"):
        seen = [(it.batch, getattr(it, end)) for it in found]
        assert len({*seen}) == len(seen), f"two readings of one {end} in a batch"
    most = max(
        [
            *Counter(it.source for it in found).values(),
            *Counter(it.target for it in found).values(),
            0,
        ]
    )
    assert len({it.batch for it in found}) <= max(0, 2 * most - 1)


def test_copies_of_an_expert_are_read_in_turn() -> None:
    """Ranks 2 and 3 want expert 0, which ranks 0 and 1 have; two readings run at once."""
    found = transfers([0, 0, 1, 2], [0, 0, 0, 0], [0, 1, 2, 3, 4], [0] * 4)
    assert found == [Transfer(0, 0, 2, 0, 0), Transfer(0, 1, 3, 0, 0)]
    assert transfers([0, 1], [0, 1], [0, 1, 2], [0, 0]) == []
