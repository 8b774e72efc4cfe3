"""Requests submitted again with the tokens that were emitted: a new epoch goes on as if nothing had happened.

Every request first runs to its end. Then each is submitted again at several cuts of its output, to ranks that have
never seen it, and must get the rest: tokens, log-probabilities and finish reason.
"""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.late_drafts import run_rank_rightly
from workers.wire.request import EngineRequest

ENDS = frozenset({256, 258})
MAX_TOKENS = 24
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "logprobs": 2},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 8},
    "penalised": {
        "temperature": 1.0,
        "seed": 9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "penalised-greedy": {"repetition_penalty": 1.6, "frequency_penalty": 0.3, "logprobs": 0},
    "min-tokens": {
        "temperature": 1.5,
        "seed": 10,
        "min_tokens": 9,
        "stop_token_ids": frozenset(range(0, 384, 3)),
    },
    "stops": {"temperature": 1.5, "seed": 11, "stop_token_ids": frozenset(range(0, 384, 12))},
    "biased": {"logit_bias": ((7, 3.0), (300, -100.0)), "temperature": 0.7, "seed": 3},
    "words": {
        "bad_words_ids": tuple((token, token) for token in range(384)),
        "allowed_token_ids": tuple(range(0, 384, 3)),
    },
    "prompt-logprobs": {"temperature": 1.0, "seed": 1, "logprobs": 1, "prompt_logprobs": 2},
    "grammar": {
        "grammar": "start: /[a-c]{4}[0-9]{4}(xy|z){3,5}/",
        "temperature": 1.0,
        "seed": 12,
        "stop_token_ids": ENDS,
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("resubmission") / "model"
    make_checkpoint(
        path, num_layers=1, hidden_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )
    return path


@pytest.fixture(scope="module")
def requests() -> dict[str, EngineRequest]:
    chance = random.Random(0)
    return {
        name: make_request(
            name, [chance.randrange(256) for _ in range(40)], max_tokens=MAX_TOKENS, **features
        )
        for name, features in FEATURES.items()
    }


def run(
    rank_pool, checkpoint: Path, requests: list[EngineRequest], function=None, **sections
) -> RankResult:
    """All requests on two ranks, their results as one; function: as of run_engines."""
    config = rank_config(checkpoint, 2, model={"max_model_len": 256}, **sections)
    events = [Event(i % 5, i % 2, request) for i, request in enumerate(requests)]
    first, second = run_engines(rank_pool, config, events, function=function)
    for name in ("tokens", "reasons", "errors", "logprobs", "prompt_logprobs", "cached_tokens"):
        getattr(first, name).update(getattr(second, name))
    first.num_preemptions += second.num_preemptions
    first.prefix_cache_hits += second.prefix_cache_hits
    first.num_draft_tokens += second.num_draft_tokens
    first.num_accepted_tokens += second.num_accepted_tokens
    return first


@pytest.fixture(scope="module")
def whole(rank_pool, checkpoint, requests) -> RankResult:
    result = run(rank_pool, checkpoint, list(requests.values()))
    assert not result.errors
    assert result.reasons["stops"] == result.reasons["grammar"] == "stop", "a useless reference"
    assert len(result.tokens["min-tokens"]) < MAX_TOKENS
    return result


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "asynchronous"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"scheduler": {"max_num_batched_tokens": 16}},
        {"cache": {"num_blocks": 14, "block_size": 8}},
        {"cache": {"prefix_caching": False}},
    ],
    ids=["cached", "chunked", "preempted", "uncached"],
)
def test_the_rest_of_every_answer(rank_pool, checkpoint, requests, whole, sections, asynchronous):
    scheduler = {"async_scheduling": asynchronous, **sections.get("scheduler", {})}
    again = cut_at_places(requests, whole)
    found = run(rank_pool, checkpoint, again, **{**sections, "scheduler": scheduler})
    assert not found.errors
    assert (found.num_preemptions > 3) == ("num_blocks" in sections.get("cache", {}))
    assert (found.prefix_cache_hits > 0) == ("prefix_caching" not in sections.get("cache", {}))
    assert_rests(found, whole, again)


def cut_at_places(requests: dict[str, EngineRequest], whole: RankResult) -> list[EngineRequest]:
    """Return all requests with several beginnings of their answers."""
    again = []
    for name, request in requests.items():
        tokens = whole.tokens[name]
        cuts = sorted({1, 5, len(tokens) // 2, len(tokens) - 1} & set(range(1, len(tokens))))
        again += [
            replace(request, request_id=f"{name} {cut}", emitted_token_ids=tokens[:cut])
            for cut in cuts
        ]
    random.Random(1).shuffle(again)
    return again


def assert_rests(found: RankResult, whole: RankResult, again: list[EngineRequest]) -> None:
    """Check that each answer goes on where its beginning ends."""
    assert not found.prompt_logprobs, "sent with the first output of the first epoch"
    assert not any(found.cached_tokens.values()), "counted in the first epoch"
    for request in again:
        name, cut = request.request_id.rsplit(" ", 1)
        rest = whole.tokens[name][int(cut) :]
        assert found.tokens[request.request_id] == rest, request.request_id
        assert found.reasons[request.request_id] == whole.reasons[name]
        logprobs = found.logprobs.get(request.request_id)
        expected = whole.logprobs.get(name)
        assert (logprobs is None) == (expected is None)
        if logprobs is not None:
            assert len(logprobs) == len(rest)
            for got, want in zip(logprobs, expected[int(cut) :], strict=True):
                assert got.rank == want.rank
                assert got.logprob == pytest.approx(want.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def with_head(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("resubmission-mtp") / "model"
    heads = {"num_nextn_predict_layers": 1, "mtp": True}
    return make_checkpoint(path, family="glm4_moe", num_layers=2, hidden_size=32, **heads)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "asynchronous"])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_the_rest_of_every_answer_with_drafts(rank_pool, with_head, requests, method, asynchronous):
    """Drafts of both epochs are verified, and an answer begins with tokens that no step of its rank has drawn."""
    whole = run(rank_pool, with_head, list(requests.values()))
    again = cut_at_places(requests, whole)
    if method == "ngram":  # which finds text, so the answer is predicted
        again = [with_prediction(it, whole.tokens) for it in again]
    answers = {it.request_id: whole.tokens[it.request_id.rsplit(" ", 1)[0]] for it in again}
    found = run(
        rank_pool,
        with_head,
        again,
        None if method == "ngram" else partial(run_rank_rightly, answers, 3),
        scheduler={"async_scheduling": asynchronous},
        cache={"num_blocks": 14, "block_size": 8},
        speculation={"method": method, "num_draft_tokens": 3, "adaptive": False},
    )
    assert not found.errors and found.num_preemptions > 3
    assert_rests(found, whole, again)
    assert found.num_draft_tokens > found.num_accepted_tokens > 100


def with_prediction(request: EngineRequest, tokens: dict[str, list[int]]) -> EngineRequest:
    """Return a request that predicts its answer, of which every eighth token is wrong."""
    answer = tokens[request.request_id.rsplit(" ", 1)[0]]
    predicted = tuple(1 if place % 8 == 7 else it for place, it in enumerate(answer))
    return replace(request, params=replace(request.params, prediction_token_ids=predicted))


def test_an_answer_that_has_ended_is_refused(rank_pool, checkpoint, requests):
    tokens = list(range(MAX_TOKENS))
    ended = replace(requests["greedy"], emitted_token_ids=tokens)
    wrong = replace(requests["grammar"], emitted_token_ids=[ord("a"), ord("9")])
    found = run(rank_pool, checkpoint, [ended, wrong])
    assert found.reasons == {"greedy": "error", "grammar": "error"}
    assert "the request has ended" in found.errors["greedy"]
    assert "cannot go on" in found.errors["grammar"]
