"""Drafts in models with linear attention: states follow the accepted drafts, on one rank stepped by hand."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import make_request, rank_config
from tests.unit.test_drafts import SALTS, Served, drafts_from, no_drafts
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.accepted_drafts import count_accepted
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import DECODE, PROMPT, VERIFY, ScheduledSequence, Sequence
from workers.step.step_output import count_verified

LONG = [(7 * i) % 250 for i in range(97)]  # one token behind six full blocks
PROMPTS = {"a": LONG, "b": [*LONG[:80], *range(60)], "c": [200] * 17}


@contextmanager
def served_states(folder: Path, family: str) -> Iterator[Served]:
    """A server of delta nets with few rows, so that later sequences get the slots of earlier ones."""
    sizes = {"num_layers": 4, "hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    checkpoint = make_checkpoint(folder, family=family, **sizes)
    config = rank_config(
        checkpoint,
        1,
        scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 3},
        speculation={"method": "ngram", "num_draft_tokens": 4},
    )
    epoch = Epoch(RankProcess(0, config), Rendezvous("127.0.0.1", 0, "alone"), 10)
    epoch.load()
    served = Served(epoch)
    epoch.scheduler.speculator = None  # drafts are made by hand
    try:
        yield served
    finally:
        epoch.process.close()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def states(request, tmp_path_factory) -> Iterator[Served]:
    with served_states(tmp_path_factory.mktemp("states"), request.param) as served:
        yield served


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 1}])
@pytest.mark.parametrize("wrong_every", [0, 1, 3])
def test_tokens_with_drafts_equal_tokens_without(states, params, wrong_every):
    """Also those of a later turn, which goes on from a state behind the prompt, and in slots with accepted drafts."""
    params = {"max_tokens": 20, **params}
    states.run(PROMPTS, no_drafts, next(SALTS), **params)
    expected, logprobs = states.tokens(), states.logprobs()
    salt = next(SALTS)
    for turn in range(3):
        states.run(PROMPTS, drafts_from(expected, wrong_every), salt, **params)
        assert states.tokens() == expected, turn
        assert states.logprobs() == pytest.approx(logprobs, abs=1e-5)
    assert num_cached(states)["a"] == 96, "one token is left of the prompt"
    later = {name: PROMPTS[name] + expected[name][:-1] for name in "ab"}
    states.run(later, no_drafts, salt, **params | {"max_tokens": 1})
    assert all(num_cached(states).values())
    assert {name: expected[name][-1:] for name in "ab"} == states.tokens()


def num_cached(states: Served) -> dict[str, int]:
    return {
        name: max(output.num_cached_tokens for output in outputs)
        for name, outputs in states.outputs.items()
    }


def test_preemptions_and_aborts_between_steps_with_drafts(states):
    """A request that was aborted comes again; its slot has gone to another sequence."""
    params = {"max_tokens": 16}
    states.run(PROMPTS, no_drafts, next(SALTS), **params)
    expected, chance = states.tokens(), random.Random(4)
    scheduler, engine = states.epoch.scheduler, states.epoch.engine
    preempted = scheduler.num_preemptions
    for _ in range(6):
        states.outputs.clear()
        salt, lost = next(SALTS), 0
        for name, prompt in PROMPTS.items():
            engine.submit(replace(make_request(name, prompt, **params), cache_salt=salt))
        for _step in range(200):
            for seq in scheduler.running:
                if seq.takes_drafts and seq.num_output_tokens:
                    seq.propose(guesses(seq, expected, chance))
            if scheduler.running and chance.random() < 0.1:
                scheduler._preempt_last()
            if lost < 3 and scheduler.running and chance.random() < 0.1:
                name, lost = chance.choice(scheduler.running).request.request_id, lost + 1
                engine.abort(name)
                again = make_request(f"{name}{lost}", PROMPTS[name[0]], **params)
                engine.submit(replace(again, cache_salt=salt))
            if not engine.step().run and not scheduler.has_work:
                break
        ended = {
            name
            for name, outputs in states.outputs.items()
            if outputs[-1].finish_reason == "length"
        }
        assert {name[0] for name in ended} == set(PROMPTS)
        for name in ended:
            assert states.tokens()[name] == expected[name[0]]
    assert scheduler.num_preemptions >= preempted + 6


def guesses(seq: Sequence, expected: dict[str, list[int]], chance: random.Random) -> list[int]:
    """Up to four tokens, of which the first ones are right."""
    known = expected[seq.request.request_id[0]][seq.num_output_tokens :][: chance.randrange(5)]
    return [token if chance.random() < 0.8 else token ^ 1 for token in known]


def test_a_warm_up_drafts_in_many_rows_and_in_few(tmp_path):
    """Kernels for both must not compile while requests run."""
    with served_states(tmp_path, "qwen3_next") as states:
        epoch, drafted = states.epoch, []
        steps = epoch.make.warm_up_steps()
        launch = epoch.runner.launch

        def keep(batch, plan):
            drafted.append((batch.num_verify, batch.num_tokens))
            return launch(batch, plan)

        epoch.runner.launch = keep
        steps.sample(epoch.runner, epoch.scheduler)
        assert [counts for counts in drafted if counts[0]] == [(3, 15), (1, 5)]


parts = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=5)


@given(parts, st.randoms(use_true_random=False))
def test_the_device_counts_the_drafts_that_the_host_counts(kinds, chance):
    """Beside decodes, and prompts with and without a draw."""
    made = []
    for kind, number in kinds:
        seq = Sequence.from_request(make_request("a", [1]))
        if kind == 0:
            made.append(ScheduledSequence(seq, DECODE, 1, 1))
        elif kind == 1:
            made.append(ScheduledSequence(seq, PROMPT, 3, number % 2))
        else:
            made.append(ScheduledSequence(seq, VERIFY, 1 + number, 1 + number, (3,) * number))
    batch = ScheduledBatch.of(made)
    if batch.draft_token_ids is None:
        return
    drawn_L = np.array([chance.choice([3, 3, 4, -1]) for _ in batch.logits_seqs])
    expected = np.maximum(count_verified(batch, drawn_L) - 1, 0)
    token_L = torch.from_numpy(drawn_L)
    assert count_accepted(batch, token_L).tolist() == expected.tolist()
    only_there = np.where(batch.draft_token_ids == 3, -5, batch.draft_token_ids)
    late, last_tokens = batch.with_drafts(only_there), torch.tensor([9, 9, 9, 9, 3])
    assert count_accepted(late, token_L, last_tokens).tolist() == expected.tolist()
    kinds_found = [part.kind for part in batch.parts if part.num_new > 1]
    assert kinds_found == sorted(kinds_found, key=lambda kind: kind is PROMPT)
    assert batch.num_verify == kinds_found.count(VERIFY)
