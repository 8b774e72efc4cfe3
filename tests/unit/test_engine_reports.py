"""What an engine reports of itself: its activity, and counts that leave probes out. Without a model."""

import threading
from dataclasses import replace

import pytest

from kernels.pending import Pending
from tests.unit.test_engine import TIMEOUT_S, Alone, Group, until
from workers.sampling.no_token import (
    ALL_FORBIDDEN,
    INVALID_LOGITS,
    LOGITS_FAILED,
    NO_TOKEN_ALLOWED,
)


def test_the_activity_shows_the_rank_that_others_wait_for():
    group = Group(2, False)
    zero, one = group.engines
    group.wait_asleep()
    first, launch, released = one.activity()[0], one.runner.launch, threading.Event()

    def stuck(batch, plan):
        released.wait(TIMEOUT_S)
        return launch(batch, plan)

    one.runner.launch = stuck
    group.submit(0, "a")
    # Both have voted once. Rank 1 is in a step before its first vote too, when rank 0 waits in that vote.
    until(lambda: (zero.activity(), one.activity()) == ((first + 1, "vote"), (first + 1, "step")))
    released.set()
    group.wait("a")
    group.wait_asleep()
    assert zero.activity()[0] > first + 1
    zero.stop()
    group.join()


def run_with_no_token_first(now: Alone, number: int) -> None:
    """Run to the end; in the first step the first request gets `number` in place of a token."""
    launch = now.engine.runner.launch

    def first_without_token(batch, plan):
        output = launch(batch, plan).wait()
        return Pending.ready(replace(output, token_ids=[number, *output.token_ids[1:]]))

    now.engine.runner.launch = first_without_token
    now.engine.step()
    now.engine.runner.launch = launch
    while now.scheduler.has_work:
        now.engine.step()


def test_a_request_with_invalid_logits_ends_alone_and_is_counted():
    now = Alone()
    now.submit("bad")
    now.submit("good")
    run_with_no_token_first(now, INVALID_LOGITS)
    errors = {name: error for _, name, _, error in now.sent if error}
    assert list(errors) == ["bad"] and errors["bad"].startswith(LOGITS_FAILED)
    assert sum(len(tokens) for _, name, tokens, _ in now.sent if name == "good") == 3
    found = now.engine.stats.snapshot()
    assert found["invalid_logits"] == found["invalid_logits_rows"] == 1


@pytest.mark.parametrize(
    ("params", "words", "num_invalid"),
    [
        ({"allowed_token_ids": (5,)}, NO_TOKEN_ALLOWED, 0),
        ({"bad_words_ids": ((5,),)}, NO_TOKEN_ALLOWED, 0),
        ({"min_tokens": 2}, LOGITS_FAILED, 1),  # such logits are the model's
    ],
)
def test_a_request_that_forbids_all_tokens_ends_alone(params, words, num_invalid):
    now = Alone()
    now.submit("bad", **params)
    now.submit("good")
    run_with_no_token_first(now, ALL_FORBIDDEN)
    errors = {name: error for _, name, _, error in now.sent if error}
    assert list(errors) == ["bad"] and errors["bad"].startswith(words)
    assert "output token 1" in errors["bad"]
    assert sum(len(tokens) for _, name, tokens, _ in now.sent if name == "good") == 3
    found = now.engine.stats.snapshot()
    assert found["invalid_logits"] == found["invalid_logits_rows"] == num_invalid


def test_probes_are_in_no_count_of_requests_or_tokens():
    now = Alone()
    now.submit("probe-1", max_tokens=1)
    now.submit("a", max_tokens=1)
    while now.scheduler.has_work or not now.sent:
        now.engine.step()
    stats = now.engine.stats.snapshot()
    assert {name for _, name, tokens, _ in now.sent if tokens} == {"probe-1", "a"}
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (2, 1)
    assert stats["prefix_cache_queries"] == 2
    for name in ("request_queue_time", "request_prefill_time", "request_inference_time"):
        assert sum(stats["histograms"][name][1][:-1]) == 1, name
