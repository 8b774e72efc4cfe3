"""Engines of a model with latent attention (MLA) and a cache in FP8: one answer from any cache, drafts and ubatches."""

import random
from pathlib import Path
from typing import Any

from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.distributed.rank_pool import RankPool
from tests.family_cases import family_checkpoint

BLOCK = 8


def traffic() -> list[Event]:
    """Prompts with common beginnings on two ranks, more than the cache holds at a time."""
    chance = random.Random(3)
    stems = [[chance.randrange(256) for _ in range(60)] for _ in range(2)]
    events = []
    for number in range(16):
        own = [chance.randrange(256) for _ in range(chance.choice([1, 9, 30]))]
        prompt = chance.choice(stems)[: chance.choice([16, 33, 60])] + own
        request = make_request(str(number), prompt, max_tokens=chance.choice([3, 12]))
        events.append(Event(2 * number, number % 2, request))
    return events


def test_latents_in_fp8_give_one_answer(rank_pool: RankPool, tmp_path: Path) -> None:
    """Chunks and the prefix cache change sums by 1e-6, which turns a rounding to e4m3 now and then."""
    checkpoint = family_checkpoint(
        tmp_path, "deepseek_v3", "untied", mtp=True, num_nextn_predict_layers=1
    )
    events = traffic()

    def serve(dtype: str = "fp8", *, caching: bool = True, **sections: Any) -> Any:
        config = rank_config(
            checkpoint,
            2,
            model={"max_model_len": 128},
            cache={
                "num_blocks": 24,
                "block_size": BLOCK,
                "prefix_caching": caching,
                "dtype": dtype,
            },
            scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 48},
            **sections,
        )
        results = run_engines(rank_pool, config, events)
        tokens = {name: ids for result in results for name, ids in result.tokens.items()}
        assert len(tokens) == len(events)
        return tokens, results

    plain, _ = serve(caching=False)
    exact, _ = serve("auto", caching=False)
    assert exact != plain, "the cache was not in FP8"
    cached, hits = serve()
    assert all(result.prefix_cache_hits > 0 for result in hits)
    drafted, drafts = serve(speculation={"method": "mtp", "num_draft_tokens": 2})
    assert sum(result.num_draft_tokens for result in drafts) > 0
    cut, steps = serve(overlap={"mode": "on", "min_decode_tokens": 2})
    assert sum(result.num_microbatched for result in steps) > 0
    for tokens in (cached, drafted, cut):
        assert sum(tokens[name] == ids for name, ids in plain.items()) >= 0.9 * len(events)
