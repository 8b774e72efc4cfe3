"""Which rank reads an expert from which rank as a layer's map changes, and in which order. Pure.

Each reading is an edge from a rank that has the expert to one that lacks it. Edges are coloured so that in one batch no
rank is read by two ranks, and no rank reads from two. Ranks do not wait for each other between batches.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """`target` reads `expert` from the slot `place` of `source`, which is counted from the source's first slot."""

    batch: int
    source: int
    target: int
    expert: int
    place: int


def transfers(
    before: Sequence[int], after: Sequence[int], starts: Sequence[int], hosts: Sequence[int]
) -> list[Transfer]:
    """Return the readings of all ranks, batch by batch, equal on every rank.

    before, after   the expert of every slot of all ranks
    starts          `num_ranks + 1` offsets of the ranks' slots
    hosts           of each rank; an expert that no rank of the target's host has is not read
    """
    ranks = range(len(starts) - 1)
    places: dict[int, dict[int, int]] = defaultdict(dict)  # of each expert, by rank
    for rank in ranks:
        for place, expert in enumerate(before[starts[rank] : starts[rank + 1]]):
            places[expert][rank] = place
    num_read = [0] * len(ranks)
    sends: list[set[int]] = [set() for _ in ranks]
    receives: list[set[int]] = [set() for _ in ranks]
    found = []
    for target in ranks:
        own = slice(starts[target], starts[target + 1])
        for expert in sorted({*after[own]} - {*before[own]}):
            sources = [rank for rank in places[expert] if hosts[rank] == hosts[target]]
            if not sources:
                continue
            source = min(sources, key=lambda rank: (num_read[rank], rank))
            num_read[source] += 1
            batch, busy = 0, sends[source] | receives[target]
            while batch in busy:
                batch += 1
            sends[source].add(batch)
            receives[target].add(batch)
            found.append(Transfer(batch, source, target, expert, places[expert][source]))
    return sorted(found)
