"""Engines with draft models on several ranks: tokens and log-probabilities equal those without, also beside idle ranks.

Random draft models are never right, so that known answers correct their drafts now and then.
"""

import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.eagle3 import make_eagle3
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.family_cases import family_checkpoint
from tests.late_drafts import run_rank_rightly
from workers.models.registry import load_model_config

SAMPLES = [
    # family, ranks, all-to-all, drafts, tokens of a step, asynchronous, ubatches, ranks with requests
    ("glm4_moe", 2, "shm", 3, 32, False, True, 1),
    ("qwen3_next", 2, "shm", 3, 32, True, False, 1),
    ("qwen3_next", 2, "shm", 2, 3, True, False, 2),
    ("eagle3", 2, "shm", 4, 32, True, True, 2),
    ("qwen3_5_moe", 1, "local", 2, 16, False, False, 1),
    pytest.param(
        *("deepseek_v3", 2, "allgather", 4, 64, True, False, 2), marks=pytest.mark.exhaustive
    ),
]
FAMILIES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "eagle3")
LIMITS = (
    (1, 48, 1),
    (2, 16, 2),
    (5, 64, 4),
    (3, 3, 2),
)  # drafts, tokens of a step, ranks with requests
EXCHANGES = ((1, "local"), (2, "torch_dist"), (3, "allgather"), (4, "hierarchical"), (2, "shm"))
ENDS = frozenset({256, 258})
FEATURES: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 1},
    {"grammar": "start: /[a-c]{4}[0-9]{4}(xy|z){3,5}/", "stop_token_ids": ENDS, "logprobs": 1},
    {"bad_words_ids": tuple((token, token) for token in range(320)), "temperature": 1.0},
)


def drafting(folder: Path, family: str) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint of a family with its head, or of qwen3_moe for eagle3; and the speculation of it."""
    if family == "eagle3":
        checkpoint = family_checkpoint(folder, "qwen3_moe", "untied")
        draft = make_eagle3(folder / "draft", load_model_config(checkpoint))
        return checkpoint, {"method": "eagle3", "draft_model": str(draft)}
    changes = {} if family.startswith("qwen3") else {"num_nextn_predict_layers": 1}
    checkpoint = family_checkpoint(folder, family, "untied", mtp=True, **changes)
    return checkpoint, {"method": "mtp"}


def arrivals(chance: random.Random, num_ranks: int, busy: int, chunk: int) -> list[Event]:
    """Requests of all features at the first `busy` ranks."""
    events = []
    for number in range(6 * max(2, num_ranks)):
        length = chance.choice([1, 9, 40, 70] if chunk > 3 else [1, 5, 9])
        prompt = [chance.randrange(256) for _ in range(length)]
        features = FEATURES[number % len(FEATURES)]
        most = 40 if number < len(FEATURES) else chance.choice([2, 30, 50])
        params = {"max_tokens": most, "seed": 100 + number, **features}
        place = chance.randrange(20), chance.randrange(min(busy, num_ranks))
        events.append(Event(*place, make_request(str(number), prompt, **params)))
    return sorted(events, key=lambda event: event.step)


@pytest.mark.parametrize(
    ("family", "num_ranks", "all2all", "most", "chunk", "asynchronous", "ubatch", "busy"),
    [
        *SAMPLES,
        *(
            pytest.param(
                *(family, *exchange, most, chunk, number % 2 == 1, number % 3 == 1, busy),
                marks=pytest.mark.exhaustive,
            )
            for number, (family, exchange) in enumerate(product(FAMILIES, EXCHANGES))
            for most, chunk, busy in [LIMITS[number % 4]]
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
    ubatch: bool,
    busy: int,
) -> None:
    checkpoint, speculation = drafting(tmp_path, family)
    events = arrivals(random.Random(most), num_ranks, busy, chunk)

    def run(wanted: dict[str, Any], function: Any = None) -> RankResult:
        config = rank_config(
            checkpoint,
            num_ranks,
            scheduler={
                "max_num_seqs": min(16, chunk - 1),
                "max_num_batched_tokens": chunk,
                "async_scheduling": asynchronous,
            },
            kernels={"all2all": all2all},
            cache={"num_blocks": 48},
            overlap={"mode": "on" if ubatch else "off", "min_decode_tokens": 3},
            speculation=wanted,
        )
        return merged(run_engines(rank_pool, config, events, function=function))

    plain = run({})
    wanted = speculation | {"num_draft_tokens": most, "adaptive": False}
    found = run(wanted, partial(run_rank_rightly, plain.tokens, most))
    assert found.tokens == plain.tokens and len(found.tokens) == len(events)
    assert not found.errors and found.reasons == plain.reasons
    assert_same_logprobs(found, plain)
    assert (found.num_microbatched > 0) == ubatch
    tokens = sum(map(len, found.tokens.values()))
    often = chunk > 3 and most > 1  # prompts leave drafts few rows of small steps
    least = tokens // (5 if often else 16)
    assert found.num_draft_tokens > found.num_accepted_tokens > least
    for first, features in enumerate(FEATURES if often else ()):
        names = map(str, range(first, len(events), len(FEATURES)))
        accepted = sum(found.accepted.get(name, 0) for name in names)
        # Beside sequences without a grammar, one with a grammar gets no drafts that only the device has.
        assert accepted or (asynchronous and "grammar" in features), features


def merged(results: list[RankResult]) -> RankResult:
    """Return the results of all ranks as one."""
    whole = RankResult()
    for result in results:
        for name in ("tokens", "reasons", "errors", "logprobs", "accepted"):
            getattr(whole, name).update(getattr(result, name))
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_microbatched"):
            setattr(whole, name, getattr(whole, name) + getattr(result, name))
    return whole


def assert_same_logprobs(found: RankResult, expected: RankResult) -> None:
    """Compare the log-probabilities and ranks of all tokens.

    Products of other numbers of rows round otherwise, and states carry that on: up to 1.1e-5 was seen.
    """
    assert found.logprobs.keys() == expected.logprobs.keys() and found.logprobs
    for name, entries in found.logprobs.items():
        assert len(entries) == len(found.tokens[name])
        for entry, other in zip(entries, expected.logprobs[name], strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=3e-5), name
            assert entry.rank == other.rank
