"""Whole engines with and without a host tier: sessions that come back to a cache that is too small get the same tokens.

All caches of the device hold one or two sessions, so each turn of a session finds its KV in host memory or nowhere.
"""

import random
from pathlib import Path

import pytest

from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.distributed.rank_pool import RankPool
from tests.family_cases import SAME_MODEL, VARIANTS, family_checkpoint

BLOCK, STEPS_A_TURN = 8, 60
FAMILIES = [family for family in VARIANTS if family not in SAME_MODEL]


def turns(chance: random.Random, num_sessions: int, num_turns: int, num_ranks: int) -> list[Event]:
    """Each session's prompts, each of which extends the one before, at any rank."""
    texts = [[chance.randrange(200) for _ in range(100)] for _ in range(num_sessions)]
    events, step = [], 0
    for turn in range(num_turns):
        for session, text in enumerate(texts):
            name = f"{session}-{turn}"
            request = make_request(name, list(text), max_tokens=4)
            events.append(Event(step, chance.randrange(num_ranks), request))
            text += [chance.randrange(200) for _ in range(40)]
            step += STEPS_A_TURN
    return events


def serve(
    pool: RankPool, checkpoint: Path, num_ranks: int, events: list[Event], **cache: object
) -> list[RankResult]:
    sizes = {"num_blocks": 40, "block_size": BLOCK, "state_snapshots": 2}
    config = rank_config(
        checkpoint,
        num_ranks,
        model={"max_model_len": 320},
        cache={**sizes, **cache},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 128},
    )
    return run_engines(pool, config, events)


def tokens_of(results: list[RankResult]) -> dict[str, list[int]]:
    assert not any(result.errors for result in results)
    return {name: ids for result in results for name, ids in result.tokens.items()}


def restored(results: list[RankResult], place: str = "host") -> float:
    return sum(result.gauges.get(f"kv_restored_{place}", 0) for result in results)


@pytest.mark.parametrize(("number", "family"), list(enumerate(FAMILIES)))
def test_sessions_of_all_families(rank_pool, tmp_path, number, family):
    num_ranks = 1 + number % 4
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    events = turns(random.Random(family), num_sessions=5, num_turns=2, num_ranks=num_ranks)
    kept = serve(rank_pool, checkpoint, num_ranks, events, host_memory_gib=0.02)
    plain = serve(rank_pool, checkpoint, num_ranks, events)
    assert tokens_of(kept) == tokens_of(plain)
    assert restored(kept) > 0 and not restored(plain)
    cached = [sum(sum(r.cached_tokens.values()) for r in results) for results in (kept, plain)]
    assert cached[0] >= cached[1] + restored(kept) / 2, "restored tokens count as cached"
