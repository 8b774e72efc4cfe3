"""Masks, edits and log-probabilities on a GPU give what they give on the CPU, step after step."""

import numpy as np
import pytest
import torch

from tests.unit.schedulers import append_token
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS
from workers.sampling.sampler import Sampler
from workers.sampling.token_bitmask import TokenBitmask
from workers.sampling.token_sampling import ALL_GREEDY, sample_tokens
from workers.step.sequence import InputBatch, Sequence
from workers.wire.request import EngineRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

V, STEPS = 1000, 30
PARAMS = [
    {},
    {"repetition_penalty": 1.5, "logprobs": 3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"frequency_penalty": -0.2, "logit_bias": ((3, 4.0), (V + 3, 1.0)), "logprobs": 0},
    {"min_tokens": 12, "stop_token_ids": frozenset(range(0, V, 2))},
    {"temperature": 0.8, "top_k": 30, "seed": 4, "repetition_penalty": 1.2, "logprobs": 5},
]


def run(device: str) -> tuple[list[list[int]], list[list[tuple]]]:
    table = InputBatch(len(PARAMS), max_model_len=64)
    sampler = Sampler(table, len(PARAMS), V, torch.device(device))
    seqs = []
    for index, params in enumerate(PARAMS):
        request = EngineRequest(
            request_id=str(index),
            ingress_id="i",
            prompt_token_ids=list(range(index + 1)),
            params=SamplingParams(**{"max_tokens": STEPS, "temperature": 0.0, **params}),
        )
        seqs.append(Sequence.from_request(request))
        table.add(seqs[-1])
        sampler.admit(seqs[-1])
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (2, -(-V // 32)), generator=generator)
    mask = TokenBitmask(torch.tensor([0, 4]), words.to(torch.int32))
    rows, told = np.array([seq.row for seq in seqs]), []
    for _ in range(STEPS):
        # Favourites make repeats likely, the spread keeps the order the same on both devices.
        logits = torch.randn(len(seqs), V, generator=generator) + 4 * (torch.arange(V) % 50 == 3)
        positions = np.array([seq.num_tokens for seq in seqs])
        sampled = sampler.sample(logits.to(device), rows, positions, mask)
        tokens, logprobs = sampled.token_B.tolist(), sampled.entries()
        for seq, token in zip(seqs, tokens, strict=True):
            append_token(table, seq, token)
        told.append([entry and tuple(entry) for entry in logprobs])
    return [seq.token_ids for seq in seqs], told


@torch.inference_mode()
def test_equal_to_the_cpu() -> None:
    tokens, told = run("cuda")
    expected_tokens, expected_told = run("cpu")
    assert tokens == expected_tokens
    for step, expected_step in zip(told, expected_told, strict=True):
        for entry, expected in zip(step, expected_step, strict=True):
            assert (entry is None) == (expected is None)
            if entry is not None:
                assert entry[1:3] == expected[1:3]
                assert entry[0] == pytest.approx(expected[0], abs=1e-4)
                assert entry[3] == pytest.approx(expected[3], abs=1e-4)


@torch.inference_mode()
def test_rows_without_a_token_have_the_number_that_the_cpu_gives() -> None:
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    logits[1, 5], logits[2, 7], logits[4, 1] = float("nan"), float("inf"), -float("inf")
    logits[3] = -float("inf")
    expected = sample_tokens(logits.clone(), ALL_GREEDY)
    assert expected[1:4].tolist() == [INVALID_LOGITS, INVALID_LOGITS, ALL_FORBIDDEN]
    assert sample_tokens(logits.cuda(), ALL_GREEDY).tolist() == expected.tolist()
