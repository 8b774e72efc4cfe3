"""The judge of answers from 16-bit engines: it passes rounding, and fails for wrong tokens."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.engine_harness import make_request
from tests.token_judge import TokenJudge, deficits, steep_routers, transformers_reference
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.schedulers import append_token
from workers.sampling.sampler import Sampler
from workers.step.sequence import InputBatch, Sequence
from workers.wire.request import EngineRequest

NUM_PROMPTS, NEW_TOKENS = 12, 8
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_k": 30, "seed": 2},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((3, 1.0),), "frequency_penalty": 0.5, "temperature": 1.0},
    {"min_tokens": 7, "stop_token_ids": frozenset(range(200))},
]
Answers = dict[str, tuple[EngineRequest, list[int]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "model"
    return steep_routers(small_checkpoint(folder, num_experts=16, num_experts_per_tok=8))


@pytest.fixture(scope="module")
def answer(checkpoint: Path) -> Callable[[EngineRequest], list[int]]:
    """Answers in bfloat16, each step a forward over all tokens."""
    rank = OneRank(checkpoint, torch.bfloat16)

    def run(request: EngineRequest) -> list[int]:
        prompt = request.prompt_token_ids
        table = InputBatch(1, len(prompt) + NEW_TOKENS + 1)
        sampler = Sampler(table, 1, 300, torch.device("cpu"))
        seq = Sequence.from_request(request)
        table.add(seq)
        sampler.admit(seq)
        for _ in range(NEW_TOKENS):
            logits = rank.logits(make_batch([seq.token_ids], [0]))[-1:].clone()
            sampled = sampler.sample(logits, np.array([0]), np.array([seq.num_tokens]))
            (token,) = sampled.token_B.tolist()
            append_token(table, seq, token)
        return seq.token_ids[len(prompt) :]

    return run


@pytest.fixture(scope="module")
def greedy(answer: Callable[[EngineRequest], list[int]]) -> Answers:
    chance = random.Random(1)
    found = {}
    for index in range(NUM_PROMPTS):
        prompt = [chance.randrange(300) for _ in range(chance.randint(2, 30))]
        request = make_request(str(index), prompt, max_tokens=NEW_TOKENS)
        found[str(index)] = request, answer(request)
    return found


@pytest.fixture
def judge(reference: Callable[[list[int]], torch.Tensor]) -> TokenJudge:
    return TokenJudge(reference, margin=0.4, mean=0.005)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[list[int]], torch.Tensor]:
    return transformers_reference(checkpoint)


def test_deficits_are_zero_for_the_best_token_only() -> None:
    logits_LV = torch.tensor([[0.0, 1.0, 3.0], [2.0, 1.0, 0.0]])
    found = deficits(logits_LV, [2, 1])
    assert found[0] == 0 and found[1] == 1 / logits_LV[1].std()


def test_rounding_passes(judge: TokenJudge, greedy: Answers) -> None:
    for name, (request, tokens) in greedy.items():
        judge.greedy(request.prompt_token_ids, tokens, name)
    judge.close(at_least=NUM_PROMPTS * NEW_TOKENS)


def test_one_wrong_token_fails(judge: TokenJudge, greedy: Answers) -> None:
    chance, missed = random.Random(2), 0
    for request, tokens in greedy.values():
        wrong = list(tokens)
        wrong[chance.randrange(NEW_TOKENS)] = chance.randrange(300)
        try:
            judge.greedy(request.prompt_token_ids, wrong, "wrong")
            missed += wrong != tokens
        except AssertionError as error:
            assert "wrong: token" in str(error)
    assert missed <= 1


def test_answers_to_other_prompts_fail(judge: TokenJudge, greedy: Answers) -> None:
    prompts = [request.prompt_token_ids for request, _ in greedy.values()]
    for prompt, (_, tokens) in zip(prompts[1:] + prompts[:1], greedy.values(), strict=True):
        with pytest.raises(AssertionError, match="below the best"):
            judge.greedy(prompt, tokens)


def test_many_small_deficits_fail(judge: TokenJudge, greedy: Answers) -> None:
    """Each token within the margin, but not all of them by chance."""
    for request, tokens in greedy.values():
        judge.greedy(request.prompt_token_ids, tokens)
    judge.found = [found + 0.05 for found in judge.found]
    with pytest.raises(AssertionError, match="mean deficit"):
        judge.close()
    with pytest.raises(AssertionError, match="tokens were judged"):
        judge.close(at_least=1000)


@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_drawn_tokens_are_replayed(
    judge: TokenJudge, answer: Callable[[EngineRequest], list[int]], params: dict[str, Any]
) -> None:
    request = make_request("drawn", list(range(40, 60)), max_tokens=NEW_TOKENS, **params)
    tokens = answer(request)
    judge.drawn(request, tokens)
    missed = 0
    for index in range(NEW_TOKENS):
        wrong = list(tokens)
        wrong[index] = (tokens[index] + 150) % 300  # half of the cumulative distribution away
        try:
            judge.drawn(request, wrong)
            missed += 1
        except AssertionError as error:
            assert "the reference draws another" in str(error)
    assert missed <= 1


def test_another_seed_fails(
    judge: TokenJudge, answer: Callable[[EngineRequest], list[int]]
) -> None:
    prompt = list(range(40, 60))
    drawn = make_request("a", prompt, max_tokens=NEW_TOKENS, temperature=0.8, seed=1)
    other = make_request("b", prompt, max_tokens=NEW_TOKENS, temperature=0.8, seed=2)
    with pytest.raises(AssertionError, match="the reference draws another"):
        judge.drawn(other, answer(drawn))
