"""Whole engines with and without a host tier: sessions that come back to a cache that is too small get the same tokens.

All caches of the device hold one or two sessions, so each turn of a session finds its KV in host memory or nowhere.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kernels.host.processes import start_ticks
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
    run_rank,
)
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_random_traffic import compare_with_alone
from tests.family_cases import SAME_MODEL, VARIANTS, family_checkpoint
from workers.config import RankConfig
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient, KeeperLostError
from workers.rank.process_group import local_rendezvous

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
    cached = [sum(sum(r.cached_tokens.values()) for r in results) for results in (kept, plain)]
    assert cached[0] >= cached[1] + restored / 2, "restored tokens count as cached"


def live_and_die(rank: int, *arguments: Any) -> RankResult:
    """A rank that leaves as a killed one does: without a word to the keeper."""
    with patch.object(KeeperClient, "leave", lambda self: None):
        return run_rank(rank, *arguments)


def run_part(
    pool: RankPool, config: RankConfig, store: str, events: list[Event]
) -> list[RankResult]:
    """Serve all events by new ranks over the store that earlier ranks have left."""
    with local_rendezvous() as rendezvous:
        arguments = config, replace(rendezvous, store=store), events, False, 20_000
        return pool.run(live_and_die, config.num_ranks, *arguments, with_group=False, timeout_s=300)


@contextmanager
def keeper_of(store: str, config: RankConfig) -> Iterator[KeeperClient]:
    """A connection to the keeper that the ranks have left."""
    name = blake2b(store.encode(), digest_size=16).hexdigest()
    size = int(config.cache.host_memory_gib * 2**30)
    client = KeeperClient(KeeperConfig(name, size, (os.getpid(), start_ticks(os.getpid()))))
    try:
        yield client
    finally:
        client.close()


def random_part(
    chance: random.Random, texts: list[list[int]], part: int, num_steps: int, num_ranks: int
) -> list[Event]:
    """Sessions that return, go on or part from each other anywhere, and aborts."""
    events, step = [], 0
    while step < num_steps:
        name, text = f"{part}-{len(events)}", chance.choice(texts)
        if len(text) > MAX_LEN - 60 or chance.random() < 0.1:
            text[:] = chance.choice(texts)[: chance.choice([0, 24, 100])]
        text += [chance.randrange(200) for _ in range(chance.choice([1, 20, 50]))]
        request = make_request(name, list(text), max_tokens=chance.randint(1, 10))
        rank = chance.randrange(num_ranks)
        events.append(Event(step, rank, request))
        if chance.random() < 0.15:
            events.append(Event(step + chance.randint(0, 8), rank, abort=name))
        step += chance.choice([0, 1, 4, 12])
    return sorted(events, key=lambda event: event.step)


def harm(chance: random.Random, store: str, config: RankConfig, disk: Path) -> None:
    """Damage rows in memory, damage or delete files, or kill the keeper and wait for its end."""
    what = chance.choice(["rows", "files", "keeper"])
    files = sorted(disk.glob("phalanx-kv/*.kv"))
    with keeper_of(store, config) as keeper:
        if what == "keeper":
            os.kill(int(keeper._ask("attach")["pid"]), signal.SIGKILL)
            with suppress(KeeperLostError):
                while True:
                    keeper.counts()
        elif what == "rows":
            for _ in range(50):
                keeper.memory[chance.randrange(len(keeper.memory) // 4)] ^= 1 + chance.randrange(99)
    for path in files if what == "files" else ():
        if chance.random() < 0.3:
            path.unlink(missing_ok=True)
        elif chance.random() < 0.5:
            os.truncate(path, chance.randrange(1000))


@pytest.mark.parametrize(
    ("family", "parts", "num_steps"),
    [
        ("qwen3_next", 3, 40),
        *(
            pytest.param(
                *(family, 8, 250), marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]
            )
            for family in SHORT
        ),
    ],
)
def test_random_steps_with_deaths(rank_pool, tmp_path, family, parts, num_steps):
    """All ranks die again and again, the keeper too, and what they have left is damaged: no token differs."""
    chance = random.Random(f"{family} {num_steps}")
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    store, disk = os.urandom(8).hex(), tmp_path / "disk"
    texts = [[chance.randrange(200) for _ in range(60)] for _ in range(8)]
    events, results = list[Event](), list[RankResult]()
    tiers: dict[str, Any] = {"host_memory_gib": 0.004, "disk_path": str(disk), "disk_gib": 0.004}
    tiers["num_blocks"] = 64 if family == "gpt_oss" else 40  # windows have blocks of their own
    for part in range(parts):
        num_ranks = chance.choice([1, 2, 3, 4])
        config = configure(checkpoint, num_ranks, **tiers)
        part_events = random_part(chance, texts, part, num_steps, num_ranks)
        results += run_part(rank_pool, config, store, part_events)
        events += part_events
        if part % 2:
            harm(chance, store, config, disk)
    with keeper_of(store, config) as keeper:
        keeper.leave()
    assert total(results, "kv_restored_host") > 0
    alone = configure(checkpoint, 1, prefix_caching=False, num_blocks=tiers["num_blocks"])
    alone = alone.model_copy(
        update={"scheduler": alone.scheduler.model_copy(update={"max_num_seqs": 1})}
    )
    compare_with_alone(rank_pool, alone, events, results)
