"""Greedy tokens and logits of every model family equal transformers', whatever the ranks."""

from pathlib import Path

import pytest

from tests.distributed.engine_harness import rank_config, run_engines
from tests.distributed.reference import arrivals, check, generate_references
from tests.family_cases import CASES, family_checkpoint

NUM_PROMPTS = 10
BACKENDS = {1: "local", 2: "shm", 3: "torch_dist", 4: "allgather"}


@pytest.mark.parametrize(("family", "variant"), CASES)
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
