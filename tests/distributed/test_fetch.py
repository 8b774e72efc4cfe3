"""A prompt computed by an engine of one node and continued by an engine of another node: the same tokens.

The nodes are keepers of this machine, which share nothing; their processes reach each other over TCP on loopback.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.engine_harness import make_request
from tests.distributed.test_hand_over import (
    BLOCK,
    FAMILY_CASES,
    NEW,
    PROMPT,
    PROMPT_IDS,
    Adapted,
    Side,
    first_part,
    ids_of,
    kill_keeper,
    rest_behind,
    sides,
    whole_of,
)
from tests.family_cases import family_checkpoint
from tests.kv_nodes import OVER_TCP, PATIENT, wait_for
from workers.kv_transfer import nixl_fetcher
from workers.kv_transfer.nixl_fetcher import NixlFetcher
from workers.kv_transfer.nixl_memory import nixl_unavailable

pytestmark = pytest.mark.skipif(nixl_unavailable() is not None, reason=str(nixl_unavailable()))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_fetcher, "FetchLimits", lambda: PATIENT)
    monkeypatch.setenv("UCX_TLS", OVER_TCP["UCX_TLS"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("fetch"), "qwen3_moe", "untied")


@contextmanager
def nodes(
    checkpoint: Path, *, adapters: tuple[Path, ...] = (), **cache: object
) -> Iterator[list[Side]]:
    """An engine on each of two nodes."""
    memory = {"host_memory_gib": 0.02, "transfer": "nixl", **cache}
    with sides(checkpoint, 2, apart=True, adapters=adapters, **memory) as made:
        yield made


def fetcher_of(side: Side) -> NixlFetcher:
    fetcher = side.epoch.process.kv_places._fetcher
    assert fetcher is not None
    return fetcher


def kill_process(side: Side) -> None:
    """End the process of a rank that runs NIXL, if there is one now."""
    if (process := fetcher_of(side)._process) is not None:
        os.kill(process._popen.pid, signal.SIGKILL)


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_an_engine_of_another_node_goes_on_behind_the_prompt(tmp_path: Path, family: str) -> None:
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    sampled = {"temperature": 0.8, "seed": 5}
    with sides(checkpoint, 1) as (alone,):
        expected = ids_of(alone.run(make_request("whole", PROMPT_IDS, max_tokens=NEW, **sampled)))
    with nodes(checkpoint) as (first, second):
        part = make_request("x", PROMPT_IDS, max_tokens=1, **sampled)
        token, end = first.run(replace(part, hands_over=True))
        assert end.kv_source and end.kv_source == fetcher_of(first).source
        rest = make_request("x~2", PROMPT_IDS, max_tokens=NEW, **sampled)
        rest = replace(rest, emitted_token_ids=token.token_ids, kv_source=end.kv_source)
        assert token.token_ids + ids_of(second.run(rest)) == expected
        assert second.gauge("kv_restored_host") >= PROMPT // BLOCK * BLOCK - 64
        assert second.gauge("kv_nixl_fetches") == 1 and second.gauge("kv_nixl_bytes") > 0
        assert second.gauge("kv_loads") == 1
        again = replace(rest, request_id="x~3")
        assert token.token_ids + ids_of(second.run(again)) == expected
        assert second.gauge("kv_nixl_fetches") == 1, "the device has the prompt"
        second.epoch.engine.scheduler.check_integrity()


def test_the_kv_of_an_adapter_comes_from_another_node(tmp_path: Path) -> None:
    """Behind the same prompt without adapter, of which this node has the KV by then."""
    adapted = Adapted.make(tmp_path)
    with nodes(adapted.checkpoint, adapters=adapted.folders) as (first, second):
        for number, adapter in enumerate((0, 2), 1):
            outputs = first.run(first_part(f"x{adapter}", adapter))
            tokens, source = ids_of(outputs), outputs[-1].kv_source
            rest = replace(rest_behind(tokens, f"x{adapter}~2", adapter), kv_source=source)
            assert tokens + ids_of(second.run(rest)) == adapted.expected[adapter]
            assert second.gauge("kv_nixl_fetches") == number
            assert second.gauge("kv_restored_host") >= number * (PROMPT // BLOCK * BLOCK - 64)


def test_every_loss_between_both_nodes_costs_time_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_fetcher, "FetchLimits", lambda: replace(PATIENT, answer_s=2))
    with sides(checkpoint, 1) as (alone,):
        expected = ids_of(alone.run(make_request("whole", PROMPT_IDS, max_tokens=NEW)))
    with nodes(checkpoint) as (first, second):
        outputs = first.run(first_part())
        tokens, source = ids_of(outputs), outputs[-1].kv_source
        kill_process(first)
        rest = replace(rest_behind(tokens), kv_source=source)
        assert tokens + ids_of(second.run(rest)) == expected
        assert not second.gauge("kv_restored_host") and second.gauge("kv_nixl_source_lost") > 0
    with nodes(checkpoint) as (first, second):
        outputs = first.run(first_part())
        tokens, source = ids_of(outputs), outputs[-1].kv_source
        kill_process(second)
        kill_keeper(second)
        rest = replace(rest_behind(tokens), kv_source=source)
        assert tokens + ids_of(second.run(rest)) == expected
        wait_for(lambda: second.gauge("kv_nixl_lost"), "the loss is counted")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_and_losses(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tiny caches and stores: each answer is that of an engine alone, and nothing is held at the end."""
    monkeypatch.setattr(nixl_fetcher, "FetchLimits", lambda: replace(PATIENT, answer_s=2))
    monkeypatch.setattr(nixl_fetcher, "RETRY_S", 0.1)
    chance = random.Random(seed)
    stems = [[chance.randrange(200) for _ in range(150)] for _ in range(4)]
    prompts = [
        [*chance.choice(stems)[: chance.randrange(20, 150)], chance.randrange(200)]
        for _ in range(40)
    ]
    with sides(checkpoint, 1) as (alone,):
        expected = [ids_of(alone.run(whole_of(number, ids))) for number, ids in enumerate(prompts)]
    with nodes(checkpoint, num_blocks=45, host_memory_gib=0.002) as (first, second):
        for number, ids in enumerate(prompts):
            part = replace(make_request(f"p{number}", ids, max_tokens=1), hands_over=True)
            outputs = first.run(part)
            tokens, source = ids_of(outputs), outputs[-1].kv_source
            loss = chance.random() if number >= len(prompts) // 2 else 1.0
            if loss < 0.2:
                kill_process(first if loss < 0.1 else second)
            elif loss < 0.3:
                kill_keeper(first if loss < 0.25 else second)
            rest = replace(whole_of(number, ids), emitted_token_ids=tokens, kv_source=source)
            assert tokens + ids_of(second.run(rest)) == expected[number], number
        assert second.gauge("kv_nixl_bytes") > 0
        for side in (first, second):
            wait_for(partial(has_settled, side), "all transfers end")
            side.epoch.engine.scheduler.check_integrity()
            assert side.gauge("kv_cache_usage") == 0


def has_settled(side: Side) -> bool:
    """Whether no transfer is open; a sleeping loop enters those that have ended."""
    side.epoch.engine._must_vote()
    return side.epoch.engine.scheduler.cache.transfers.num_open == 0
