"""Penalties, min_tokens, bias and log-probabilities through whole engines, against transformers' logits.

Each answer is judged by one forward of transformers over prompt and answer: every token must be the best of the
edited logits there (or tie with it), and every log-probability must be that of the raw ones.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.distributed.reference import TIE, write_checkpoint
from workers.wire.request import EngineRequest, TokenLogprobs

NEW_TOKENS = 24
CLOSE = 1e-3
FEATURES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 0.4, "logprobs": 0},
    {"frequency_penalty": 0.3, "prompt_logprobs": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": -0.1, "logprobs": 4, "prompt_logprobs": 0},
    {"logit_bias": ((7, 3.0), (300, -100.0)), "presence_penalty": 1.0, "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 384, 3))},
    {"bad_words_ids": tuple((token, token) for token in range(384)), "logprobs": 1},
    {
        "bad_words_ids": (*((token,) for token in range(0, 384, 2)), (1, 3, 5), (9,) * 5),
        "allowed_token_ids": (*range(60), *range(200, 384, 3)),
        "repetition_penalty": 1.1,
    },
    {"temperature": 0.8, "top_k": 40, "seed": 5, "logprobs": 5, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sampling") / "model")


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    chance = random.Random(0)
    lengths = [1, 2, 16, 33, 129, 300, 90, 65]
    shared = [chance.randrange(256) for _ in range(400)]
    return [
        make_request(
            f"{length}-{index}",
            # Every second one shares its beginning with others: what is cached must not disturb.
            shared[:length] if index % 2 else [chance.randrange(256) for _ in range(length)],
            max_tokens=NEW_TOKENS,
            **features,
        )
        for index, features in enumerate(FEATURES)
        for length in chance.sample(lengths, 4)
    ]


@pytest.fixture(scope="module")
def logits_of(checkpoint):
    """float32 [tokens, V] of transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def run(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].float()

    return run


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"scheduler": {"max_num_batched_tokens": 64}}),
        (1, {"scheduler": {"max_num_batched_tokens": 512, "chunked_prefill": False}}),
        (2, {"scheduler": {"max_num_batched_tokens": 37}}),
        (2, {"cache": {"num_blocks": 26}, "scheduler": {"max_num_batched_tokens": 50}}),
        (
            2,
            {
                "cache": {"num_blocks": 26},
                "scheduler": {"max_num_batched_tokens": 50, "async_scheduling": True},
            },
        ),
    ],
    ids=["1-chunked", "1-whole", "2-chunked", "2-preempted", "2-preempted-async"],
)
def test_features_equal_transformers(rank_pool, checkpoint, requests, logits_of, ranks, sections):
    config = rank_config(checkpoint, ranks, model={"max_model_len": 400}, **sections)
    events = [Event(i % 7, i % ranks, request) for i, request in enumerate(requests)]
    results = run_engines(rank_pool, config, events)
    assert len({result.num_steps for result in results}) == 1, "ranks ran different steps"
    if "cache" in sections:
        assert sum(result.num_preemptions for result in results) > 3
    for event, request in zip(events, requests, strict=True):
        _check(request, results[event.rank], logits_of)


def test_nobody_disturbs_the_others(rank_pool, checkpoint, requests):
    """All features in one batch give every request the tokens that it gets alone."""
    config = rank_config(checkpoint, 1)
    (together,) = run_engines(rank_pool, config, [Event(0, 0, request) for request in requests])
    one = rank_config(checkpoint, 1, scheduler={"max_num_seqs": 1})
    (alone,) = run_engines(rank_pool, one, [Event(0, 0, request) for request in requests])
    assert together.tokens == alone.tokens and together.reasons == alone.reasons


def _check(request: EngineRequest, result: RankResult, logits_of) -> None:
    name, params, prompt = request.request_id, request.params, request.prompt_token_ids
    tokens, num_prompt = result.tokens[name], len(request.prompt_token_ids)
    logits_TV = logits_of(prompt + tokens)
    output_logits_NV = logits_TV[num_prompt - 1 : -1]
    _check_logprobs(result.logprobs.get(name), output_logits_NV, tokens, params.logprobs)
    told = result.prompt_logprobs.get(name)
    if told is not None:
        assert told[0] is None
        told = told[1:]
    _check_logprobs(told, logits_TV[: num_prompt - 1], prompt[1:], params.prompt_logprobs)
    if params.temperature == 0:
        for index, token in enumerate(tokens):
            edited_V = _edited(request, tokens[:index], output_logits_NV[index])
            assert edited_V.max() - edited_V[token] < TIE, f"{name}: token {index}"
    if params.stop_token_ids:
        assert len(tokens) > params.min_tokens
        stopped = tokens[-1] in params.stop_token_ids
        assert result.reasons[name] == ("stop" if stopped else "length")
        assert not params.stop_token_ids.intersection(tokens[:-1])


def _edited(request: EngineRequest, output: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    params = request.params
    edited_V = logits_V.clone()
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(len(edited_V), dtype=torch.bool)
        allowed[list(params.allowed_token_ids)] = True
        edited_V[~allowed] = -torch.inf
    for *prefix, last in params.bad_words_ids:
        if not prefix or output[-len(prefix) :] == prefix:
            edited_V[last] = -torch.inf
    if len(output) < params.min_tokens:
        edited_V[list(params.stop_token_ids)] = -torch.inf
    for token, bias in params.logit_bias:
        edited_V[token] += bias
    if params.repetition_penalty != 1:
        seen = torch.tensor([request.prompt_token_ids + output])
        penalise = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        edited_V = penalise(seen, edited_V.unsqueeze(0))[0]
    for token in set(output):
        edited_V[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return edited_V


def _check_logprobs(
    found: list[TokenLogprobs] | None,
    logits_NV: torch.Tensor,
    tokens: list[int],
    num_top: int | None,
) -> None:
    assert (found is None) == (num_top is None)
    if found is None:
        return
    assert len(found) == len(tokens) == len(logits_NV)
    expected_NV = logits_NV.log_softmax(-1)
    for entry, token, expected_V in zip(found, tokens, expected_NV, strict=True):
        assert entry.logprob == pytest.approx(expected_V[token].item(), abs=CLOSE)
        # As many are better for certain, as many may be.
        better = int((expected_V > expected_V[token] + CLOSE).sum())
        perhaps = int((expected_V > expected_V[token] - CLOSE).sum())
        assert better + 1 <= entry.rank <= perhaps
        assert len(entry.top_ids) == num_top
        best = expected_V.topk(num_top).values.tolist()
        assert entry.top_logprobs == pytest.approx(best, abs=CLOSE)
        assert expected_V[entry.top_ids].tolist() == pytest.approx(best, abs=CLOSE)
