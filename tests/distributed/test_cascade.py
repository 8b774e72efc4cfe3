"""Whole engines that read shared KV blocks once and that do not: the same tokens, equal log-probabilities."""

import random
from pathlib import Path
from typing import Any

import pytest

from kernels.attention.base import Attention
from kernels.attention.native import NativeAttention
from kernels.attention.shared_prefixes import SharingCost
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
    run_rank,
)
from tests.distributed.rank_pool import RankPool
from tests.family_cases import family_checkpoint
from workers.config import RankConfig

BLOCK = 8


def run_sharing(*arguments: Any) -> RankResult:
    """As `run_rank`; a shared pass always pays."""
    classes = Attention, NativeAttention
    before = [it.sharing_cost for it in classes]
    try:
        for it in classes:
            it.sharing_cost = SharingCost(1, 1)
        return run_rank(*arguments)
    finally:
        for it, cost in zip(classes, before, strict=True):
            it.sharing_cost = cost


def traffic(chance: random.Random, num_ranks: int) -> list[Event]:
    """Prompts that begin alike, and alike for longer in parts; they join and leave in the middle, some by an abort."""
    stem = [chance.randrange(256) for _ in range(64)]
    branches = [stem[:24] + [chance.randrange(256) for _ in range(40)] for _ in range(2)]
    events, step = [], 0
    for number in range(24 * num_ranks):
        step += chance.choice([0, 1, 2])
        own = [chance.randrange(256) for _ in range(chance.choice([1, 7, 8, 20]))]
        prompt = chance.choice([stem, *branches])[: chance.choice([20, 40, 64])] + own
        params = {"max_tokens": chance.randint(2, 24), "logprobs": 0}
        rank = number % num_ranks
        events.append(Event(step, rank, make_request(str(number), prompt, **params)))
        if chance.random() < 0.1:
            events.append(Event(step + chance.randint(3, 9), rank, abort=str(number)))
    return sorted(events, key=lambda event: event.step)


def check_equal(pool: RankPool, config: RankConfig, tolerance: float = 1e-5) -> list[RankResult]:
    """Serve with and without; return the results with."""
    events = traffic(random.Random(7), config.num_ranks)
    kernels = config.kernels.model_copy(update={"cascade": "off"})
    off = config.model_copy(update={"kernels": kernels})
    shared, alone = (run_engines(pool, it, events, function=run_sharing) for it in (config, off))
    assert all(it.shared_prefix_rows > 0 for it in shared)
    assert not any(it.shared_prefix_rows for it in alone)
    aborted = {event.abort for event in events if event.abort is not None}
    for one, other in zip(shared, alone, strict=True):
        assert one.reasons.keys() | aborted == other.reasons.keys() | aborted
        for name in one.reasons.keys() - aborted:
            assert one.tokens[name] == other.tokens[name]
            for ours, theirs in zip(one.logprobs[name], other.logprobs[name], strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerance)
    return shared


def sections(**changes: Any) -> dict[str, Any]:
    cache = {"num_blocks": 120, "block_size": BLOCK} | changes.pop("cache", {})
    scheduler = {"max_num_seqs": 12, "max_num_batched_tokens": 64}
    return {"cache": cache, "scheduler": scheduler, "model": {"max_model_len": 160}, **changes}


@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen3_moe", "auto"), ("qwen3_moe", "sdpa"), ("deepseek_v3", "auto"), ("gpt_oss", "auto")],
)
def test_families(rank_pool, tmp_path: Path, family: str, attention: str):
    """Heads in C and by torch's operators, latents, windows with sinks."""
    checkpoint = family_checkpoint(tmp_path, family, "untied")
    config = rank_config(checkpoint, 1, **sections(kernels={"attention": attention}))
    (result,) = check_equal(rank_pool, config)
    assert result.prefix_cache_hits > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("cascade"), "qwen3_moe", "untied")


def test_ubatches_of_two_ranks(rank_pool, checkpoint: Path):
    overlap = {"mode": "on", "min_decode_tokens": 2, "min_prefill_tokens": 2}
    config = rank_config(checkpoint, 2, **sections(overlap=overlap))
    assert all(result.num_microbatched > 0 for result in check_equal(rank_pool, config))


def test_a_small_cache_preempts(rank_pool, checkpoint: Path):
    """Sequences that come back join their group again."""
    config = rank_config(checkpoint, 1, **sections(cache={"num_blocks": 34}))
    assert check_equal(rank_pool, config)[0].num_preemptions > 0


def test_drafts(rank_pool, checkpoint: Path):
    """Rows that verify drafts read their whole sequences, beside decodes that share."""
    config = rank_config(
        checkpoint, 1, **sections(speculation={"method": "ngram", "adaptive": False})
    )
    assert check_equal(rank_pool, config)[0].num_draft_tokens > 0


def test_without_a_prefix_cache_nothing_is_shared(rank_pool, checkpoint: Path):
    config = rank_config(checkpoint, 1, **sections(cache={"prefix_caching": False}))
    events = traffic(random.Random(7), 1)
    (result,) = run_engines(rank_pool, config, events, function=run_sharing)
    assert not result.shared_prefix_rows
