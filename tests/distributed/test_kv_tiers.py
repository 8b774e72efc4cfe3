"""Whole engines with and without a host tier: sessions that come back to a cache that is too small get the same tokens.

All caches of the device hold one or two sessions, so each turn of a session finds its KV in host memory or nowhere.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from cluster.metrics.kv_transfer import kv_families
from cluster.metrics.snapshot import PREFIX
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.family_cases import SAME_MODEL, VARIANTS, family_checkpoint
from workers.config import RankConfig
from workers.kv_transfer.host_tier import LEAST_UNIT

BLOCK, STEPS_A_TURN, MAX_LEN = 8, 60, 320
# One family of each kind of memory: heads, latents, windows, states.
SHORT = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
FAMILIES = [family for family in VARIANTS if family not in SAME_MODEL]


def turns(chance: random.Random, num_sessions: int, num_turns: int, num_ranks: int) -> list[Event]:
    """Each session's prompts, each of which extends the one before, at any rank."""
    texts = [[chance.randrange(200) for _ in range(100)] for _ in range(num_sessions)]
    events, step = [], 0
    for turn in range(num_turns):
        for session, text in enumerate(texts):
            request = make_request(f"{session}-{turn}", list(text), max_tokens=4)
            events.append(Event(step, chance.randrange(num_ranks), request))
            text += [chance.randrange(200) for _ in range(40)]
            step += STEPS_A_TURN
    return events


def configure(checkpoint: Path, num_ranks: int, **cache: object) -> RankConfig:
    sizes = {"num_blocks": 40, "block_size": BLOCK, "state_snapshots": 2}
    return rank_config(
        checkpoint,
        num_ranks,
        model={"max_model_len": MAX_LEN},
        cache={**sizes, **cache},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 128},
    )


def tokens_of(results: list[RankResult]) -> dict[str, list[int]]:
    assert not any(result.errors for result in results)
    return {name: ids for result in results for name, ids in result.tokens.items()}


def total(results: list[RankResult], gauge: str) -> float:
    return sum(result.gauges.get(gauge, 0) for result in results)


def metric(results: list[RankResult], name: str) -> Counter[str]:
    """A metric of KV outside the devices, of all ranks together, by its direction."""
    found = Counter[str]()
    for family in kv_families([result.gauges for result in results], "model"):
        for sample in family.samples if family.name == PREFIX + name else ():
            found[sample.labels.get("direction", "")] += sample.value
    return found


@pytest.mark.parametrize(
    ("number", "family"),
    [
        pytest.param(number, family, marks=[] if family in SHORT else pytest.mark.exhaustive)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_sessions_of_all_families(rank_pool, tmp_path, number, family):
    num_ranks = 1 + number % 4
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    events = turns(random.Random(family), num_sessions=5, num_turns=2, num_ranks=num_ranks)
    kept, plain = (
        run_engines(rank_pool, configure(checkpoint, num_ranks, **tier), events)
        for tier in ({"host_memory_gib": 0.02}, {})
    )
    assert tokens_of(kept) == tokens_of(plain)
    restored = total(kept, "kv_restored_host")
    assert restored > 0 and not total(plain, "kv_restored_host")
    moved = metric(kept, "kv_moved_bytes")
    assert moved["load"] >= restored / BLOCK * LEAST_UNIT and moved["save"] > 0
    assert metric(kept, "kv_load_seconds")[""] > 0
    cached = [sum(sum(r.cached_tokens.values()) for r in results) for results in (kept, plain)]
    assert cached[0] >= cached[1] + restored / 2, "restored tokens count as cached"
