"""Greedy tokens and logits of every model family equal transformers', whatever the ranks."""

from pathlib import Path

import pytest

from tests.distributed.engine_harness import Event, rank_config, run_engines
from tests.distributed.reference import arrivals, check, generate_references
from tests.family_cases import CASES, SAME_MODEL, family_checkpoint

NUM_PROMPTS = 10
BACKENDS = {1: "local", 2: "shm", 3: "torch_dist", 4: "allgather"}


# Open groups are tested below, and Kimi-K2 is DeepSeek-V3 under another name.
BOTH = [case for case in CASES if case[1] != "open_groups" and case[0] not in SAME_MODEL]


@pytest.mark.parametrize(("family", "variant"), BOTH)
def test_tokens_and_logits_equal_transformers(
    rank_pool, tmp_path: Path, family: str, variant: str
) -> None:
    """Each number of ranks reads the same weights in another spelling and number of files."""
    checkpoints = {
        ranks: family_checkpoint(
            tmp_path / str(ranks),
            family,
            variant,
            resaved=ranks in (2, 3),
            num_files=3 if ranks in (1, 2) else 1,
        )
        for ranks in BACKENDS
    }
    references = generate_references(checkpoints[1], count=NUM_PROMPTS)
    for ranks, all2all in BACKENDS.items():
        config = rank_config(checkpoints[ranks], ranks, kernels={"all2all": all2all})
        events = arrivals(references, NUM_PROMPTS, ranks)
        results = run_engines(rank_pool, config, events, keep_logits=True)
        check(references, results, NUM_PROMPTS)


@pytest.mark.parametrize(
    ("ranks", "all2all", "num_ubatches", "first"),
    [(2, "shm", 2, 0), (3, "torch_dist", 3, 5), (4, "allgather", 2, 5), (1, "local", 2, 0)],
)
def test_shared_experts_in_ubatches_and_on_idle_ranks(
    rank_pool, tmp_path: Path, ranks: int, all2all: str, num_ubatches: int, first: int
) -> None:
    """From the prompt of 600 tokens on there is one prompt: all ranks but one have no tokens."""
    checkpoint = family_checkpoint(tmp_path, "qwen2_moe", "untied")
    references = generate_references(checkpoint, count=6)[first:]
    config = rank_config(
        checkpoint,
        ranks,
        kernels={"all2all": all2all},
        scheduler={"max_num_batched_tokens": 128},
        overlap={"mode": "on", "num_ubatches": num_ubatches},
    )
    events = arrivals(references, len(references), ranks)
    results = run_engines(rank_pool, config, events, keep_logits=True)
    check(references, results, len(references))
    assert all(result.num_microbatched > 0 for result in results)


@pytest.mark.parametrize(
    ("family", "ranks", "all2all"),
    [("deepseek_v2", 2, "shm"), ("deepseek_v3", 3, "torch_dist"), ("glm4_moe", 4, "allgather")],
)
def test_small_chunks_in_ubatches_in_a_cache_too_small(
    rank_pool, tmp_path: Path, family: str, ranks: int, all2all: str
) -> None:
    """Prompts of up to 600 tokens in chunks of 48; sequences lose their blocks and compute them again."""
    checkpoint = family_checkpoint(tmp_path, family, "open_groups")
    references = generate_references(checkpoint, count=NUM_PROMPTS)
    references += references[:6]  # again, when the cache is full of their blocks
    hits = []
    for prefix_caching in (True, False):
        config = rank_config(
            checkpoint,
            ranks,
            kernels={"all2all": all2all},
            scheduler={"max_num_batched_tokens": 48},
            cache={"num_blocks": 40, "prefix_caching": prefix_caching},
            overlap={"mode": "on", "num_ubatches": 2},
        )
        count = len(references)
        events = [
            Event(event.step + 60 * (number >= NUM_PROMPTS), 0, event.request)
            for number, event in enumerate(arrivals(references, count, 1))
        ]
        results = run_engines(rank_pool, config, events, keep_logits=True)
        check(references, results, count)
        assert results[0].num_preemptions > 0
        assert all(result.num_microbatched > 0 for result in results)
        hits.append(results[0].prefix_cache_hits)
    assert hits[0] > 0 and hits[1] == 0
