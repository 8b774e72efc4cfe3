"""Engines that speculate on one and more ranks: the tokens of engines that do not."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.distributed.test_draft_models import drafting
from tests.distributed.test_random_traffic import answers_alone, compare, random_traffic
from tests.late_drafts import run_rank_rightly
from workers.wire.request import EngineRequest, SamplingParams

SMALL = {"num_layers": 2, "hidden_size": 64, "num_experts": 8, "vocab_size": 320}


def repeating(chance: random.Random, name: str) -> EngineRequest:
    """A request with an output of few tokens, so that it often repeats what it had, and often does not."""
    prompt = [chance.randrange(4) for _ in range(chance.choice([2, 9, 40]))]
    params = {"max_tokens": chance.choice([3, 17, 30]), "allowed_token_ids": (4, 5, 6)}
    if chance.random() < 0.6:
        params |= {"temperature": 1.0, "seed": chance.randrange(99), "logit_bias": ((4, 2.0),)}
    if chance.random() < 0.3:
        params |= {"frequency_penalty": 0.2, "repetition_penalty": 1.2, "logprobs": 1}
    if chance.random() < 0.3:
        params |= {"bad_words_ids": ((4, 4, 4, 5), (6, 6)), "prediction_token_ids": (4, 5, 4, 6)}
    if chance.random() < 0.2:
        params |= {"stop_token_ids": frozenset([6]), "min_tokens": 2}
    return make_request(name, prompt, **params)


SAMPLES = [
    ("qwen3_moe", 1, 1, 3, False),
    ("deepseek_v3", 2, 3, 16, True),
    ("gpt_oss", 2, 5, 64, False),
    ("qwen3_next", 1, 5, 16, False),
    ("qwen3_5_moe", 2, 2, 3, True),
]
DELTA_NETS = ("qwen3_next", "qwen3_5_moe")
LIMITS = ((1, 64), (2, 6), (3, 16), (4, 64), (5, 8))  # drafts, tokens of a step
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2", "mixtral")
OF_STATES = product(DELTA_NETS, (1, 2), LIMITS)


@pytest.mark.parametrize(
    ("family", "num_ranks", "most", "chunk", "asynchronous"),
    [
        *SAMPLES,
        *(
            pytest.param(
                *(family, ranks, *LIMITS[number % 5], ranks % 2 == 0), marks=pytest.mark.exhaustive
            )
            for number, (family, ranks) in enumerate(product(FAMILIES, (1, 2, 4)))
        ),
        *(
            pytest.param(family, ranks, most, chunk, most % 2 == 0, marks=pytest.mark.exhaustive)
            for family, ranks, (most, chunk) in OF_STATES
        ),
    ],
)
def test_tokens_equal_those_without_speculation(
    rank_pool, tmp_path, family, num_ranks, most, chunk, asynchronous
):
    """With chunks of prompts, windows, latents, preemptions and several ranks."""
    checkpoint = make_checkpoint(tmp_path, family=family, **SMALL)
    chance = random.Random(most)
    events = [
        Event(chance.randrange(30), chance.randrange(num_ranks), repeating(chance, str(number)))
        for number in range(8 * num_ranks)
    ]
    limits = {"cache": {"num_blocks": 30, "block_size": 4}, "model": {"max_model_len": 80}}
    # Each running sequence takes a token of a step, and drafts take what is left.
    steps = {"max_num_seqs": min(4, chunk - 1), "max_num_batched_tokens": chunk}

    def run(speculation: dict, ranks: int, placed: list[Event]):
        config = rank_config(
            checkpoint,
            ranks,
            scheduler=steps | {"async_scheduling": asynchronous},
            speculation=speculation,
            **limits,
        )
        results = run_engines(rank_pool, config, sorted(placed, key=lambda it: it.step))
        tokens = {name: ids for result in results for name, ids in result.tokens.items()}
        logprobs = {
            name: [entry.logprob for entry in entries]
            for result in results
            for name, entries in result.logprobs.items()
        }
        return tokens, logprobs, results

    drafted, drafted_logprobs, results = run(
        {"method": "ngram", "num_draft_tokens": most, "adaptive": False}, num_ranks, events
    )
    plain, plain_logprobs, without = run({}, num_ranks, events)
    assert drafted == plain and len(drafted) == len(events)
    assert drafted_logprobs.keys() == plain_logprobs.keys()
    for name, values in drafted_logprobs.items():
        assert values == pytest.approx(plain_logprobs[name], abs=1e-5)
    drafts = sum(result.num_draft_tokens for result in results)
    accepted = sum(result.num_accepted_tokens for result in results)
    # The requests of one rank may be too few for both.
    assert drafts > accepted > 0 or (drafts and len(events) < 16)
    assert not any(result.num_draft_tokens for result in without)


def traffic(seed: int, num_steps: int, num_ranks: int) -> list[Event]:
    """Random arrivals and aborts, with prompts and outputs that repeat, and grammars."""
    chance, grammars = random.Random(seed), random.Random(seed + 1)
    events = []
    for event in random_traffic(chance, num_steps, num_ranks):
        if event.request is not None:
            changed = repeating(chance, event.request.request_id)
            if grammars.random() < 0.2:
                changed = replace(changed, params=constrained(grammars))
            event = replace(event, request=changed)
        events.append(event)
    return events


def constrained(chance: random.Random) -> SamplingParams:
    """An output of few letters that a grammar allows, and the end of it."""
    grammar = f"start: /([ab][cd][ef]){{{chance.choice([1, 4, 10])}}}/"
    ends = frozenset({256, 258})
    seeded = {"temperature": chance.choice([0.0, 1.0]), "seed": chance.randrange(99)}
    return SamplingParams(max_tokens=40, grammar=grammar, stop_token_ids=ends, **seeded)


OF_MODELS = product(("glm4_moe", "qwen3_next", "eagle3"), ((True, True), (False, False)))


@pytest.mark.parametrize(
    ("family", "method", "all2all", "asynchronous", "ubatch", "adaptive", "num_steps"),
    [
        ("qwen3_moe", "ngram", "shm", True, False, False, 80),
        ("qwen3_next", "ngram", "shm", True, False, True, 60),
        ("qwen3_next", "mtp", "shm", True, True, False, 60),
        ("eagle3", "eagle3", "shm", False, False, False, 60),
        *(
            pytest.param(
                *(family, "ngram", *case),
                marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)],
            )
            for family in ("qwen3_moe", "qwen3_next")
            for case in (
                ("shm", False, True, True, 2000),
                ("allgather", True, True, False, 500),
                ("torch_dist", False, False, False, 500),
            )
        ),
        *(
            pytest.param(
                *(family, family if family == "eagle3" else "mtp", "shm", *modes, adaptive, 500),
                marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)],
            )
            for number, (family, modes) in enumerate(OF_MODELS)
            for adaptive in [number % 4 == 1]
        ),
    ],
)
def test_random_traffic_with_drafts(
    rank_pool, tmp_path, family, method, all2all, asynchronous, ubatch, adaptive, num_steps
):
    """Ranks that speculate, that have prompts alone and that are idle; aborts, preemptions and grammars."""
    num_ranks = 4
    function: Callable[..., Any] | None = None
    if method == "ngram":
        checkpoint, speculation = (
            make_checkpoint(tmp_path, family=family, **SMALL),
            {"method": method},
        )
    else:
        checkpoint, speculation = drafting(tmp_path, family)
    events = traffic(num_steps, num_steps, num_ranks)
    limits = {"model": {"max_model_len": 112}, "cache": {"num_blocks": 28, "block_size": 4}}
    alone = rank_config(checkpoint, 1, scheduler={"max_num_seqs": 1}, **limits)
    answers = answers_alone(rank_pool, alone, events)
    if method != "ngram":
        function = partial(run_rank_rightly, answers, 3)
    config = rank_config(
        checkpoint,
        num_ranks,
        kernels={"all2all": all2all},
        scheduler={
            "max_num_seqs": 5,
            "max_num_batched_tokens": 32,
            "async_scheduling": asynchronous,
        },
        overlap={"mode": "on" if ubatch else "off", "min_decode_tokens": 3},
        speculation=speculation | {"num_draft_tokens": 3, "adaptive": adaptive},
        **limits,
    )
    bounds = {"max_steps": 20 * num_steps, "timeout_s": 600}
    results = run_engines(rank_pool, config, events, function=function, **bounds)
    assert len({result.num_steps for result in results}) == 1
    assert sum(result.num_preemptions for result in results) > 0
    assert ubatch == any(result.num_microbatched for result in results)
    accepted = sum(result.num_accepted_tokens for result in results)
    assert accepted > 80
    compare(events, results, answers)


def test_a_cache_in_eight_bits(rank_pool, tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path, **SMALL)
    chance = random.Random(3)
    events = [Event(0, 0, repeating(chance, str(number))) for number in range(6)]
    cache = {"dtype": "fp8", "num_blocks": 60}
    results = [
        run_engines(rank_pool, rank_config(checkpoint, 1, cache=cache, speculation=it), events)[0]
        for it in ({}, {"method": "ngram", "adaptive": False})
    ]
    assert results[0].tokens == results[1].tokens and results[1].num_accepted_tokens > 0
