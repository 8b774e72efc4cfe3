"""Engines with draft models on several ranks: tokens equal those without, also beside idle ranks."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.eagle3 import make_eagle3
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.family_cases import family_checkpoint
from workers.models.registry import load_model_config

SAMPLES = [
    # family, ranks, all-to-all, drafts, tokens of a step, asynchronous, ranks with requests
    ("glm4_moe", 2, "shm", 3, 32, False, 1),
    ("qwen3_next", 2, "shm", 3, 32, True, 1),
    ("qwen3_5_moe", 1, "local", 2, 16, False, 1),
    pytest.param(*("deepseek_v3", 2, "allgather", 4, 64, True, 2), marks=pytest.mark.exhaustive),
]
FAMILIES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "eagle3")
LIMITS = ((1, 48, 1), (2, 16, 2), (5, 64, 4))  # drafts, tokens of a step, ranks with requests
EXCHANGES = ((1, "local"), (2, "torch_dist"), (3, "allgather"), (4, "hierarchical"))


@pytest.mark.parametrize(
    ("family", "num_ranks", "all2all", "most", "chunk", "asynchronous", "busy"),
    [
        *SAMPLES,
        *(
            pytest.param(
                *(family, *exchange, most, chunk, most % 2 == 1, busy), marks=pytest.mark.exhaustive
            )
            for number, (family, exchange) in enumerate(product(FAMILIES, EXCHANGES))
            for most, chunk, busy in [LIMITS[number % 3]]
        ),
    ],
)
def test_tokens_equal_those_without_a_draft_model(
    rank_pool: Any,
    tmp_path: Path,
    family: str,
    num_ranks: int,
    all2all: str,
    most: int,
    chunk: int,
    asynchronous: bool,
    busy: int,
) -> None:
    if family == "eagle3":
        checkpoint = family_checkpoint(tmp_path, "qwen3_moe", "untied")
        draft = make_eagle3(tmp_path / "draft", load_model_config(checkpoint))
        speculation: dict[str, Any] = {"method": "eagle3", "draft_model": str(draft)}
    else:
        changes = {} if family.startswith("qwen3") else {"num_nextn_predict_layers": 1}
        checkpoint = family_checkpoint(tmp_path, family, "untied", mtp=True, **changes)
        speculation = {"method": "mtp"}
    chance = random.Random(most)
    events = []
    for number in range(6 * num_ranks):
        prompt = [chance.randrange(256) for _ in range(chance.choice([1, 9, 40, 70]))]
        params = {"max_tokens": chance.choice([2, 9, 20]), "seed": 7, "temperature": number % 2}
        place = chance.randrange(20), chance.randrange(min(busy, num_ranks))
        events.append(Event(*place, make_request(str(number), prompt, **params)))
    events.sort(key=lambda event: event.step)

    def run(wanted: dict[str, Any]) -> tuple[dict[str, list[int]], int]:
        config = rank_config(
            checkpoint,
            num_ranks,
            scheduler={"max_num_batched_tokens": chunk, "async_scheduling": asynchronous},
            kernels={"all2all": all2all},
            cache={"num_blocks": 48},
            speculation=wanted,
        )
        results = run_engines(rank_pool, config, events)
        tokens = {name: ids for result in results for name, ids in result.tokens.items()}
        return tokens, sum(result.num_draft_tokens for result in results)

    plain, _ = run({})
    found, num_drafts = run(speculation | {"num_draft_tokens": most, "adaptive": False})
    assert found == plain and len(found) == len(events)
    assert num_drafts > 10 * most
