"""What an engine reports of itself: its activity, and counts that leave probes out. Without a model."""

import threading
import time
from dataclasses import replace

from kernels.pending import Pending
from tests.unit.test_engine import TIMEOUT_S, Alone, Group


def test_the_activity_shows_the_rank_that_others_wait_for():
    group = Group(2, False)
    zero, one = group.engines
    until(lambda: zero.activity()[1] == one.activity()[1] == "sleep")
    first, launch, released = one.activity()[0], one.runner.launch, threading.Event()

    def stuck(batch, plan):
        released.wait(TIMEOUT_S)
        return launch(batch, plan)

    one.runner.launch = stuck
    group.submit(0, "a")
    until(lambda: (zero.activity()[1], one.activity()[1]) == ("vote", "step"))
    assert zero.activity()[0] == one.activity()[0] == first + 1, "both have voted once"
    released.set()
    group.wait("a")
    until(lambda: zero.activity()[1] == one.activity()[1] == "sleep")
    assert zero.activity()[0] > first + 1
    zero.stop()
    group.join()


def until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_request_with_invalid_logits_ends_alone_and_is_counted():
    now = Alone()
    launch = now.engine.runner.launch

    def invalid_for_the_first(batch, plan):
        output = launch(batch, plan).wait()
        return Pending.ready(replace(output, token_ids=[-1, *output.token_ids[1:]]))

    now.submit("bad")
    now.submit("good")
    now.engine.runner.launch = invalid_for_the_first
    now.engine.step()
    now.engine.runner.launch = launch
    while now.scheduler.has_work:
        now.engine.step()
    errors = {name: error for _, name, _, error in now.sent if error}
    assert list(errors) == ["bad"] and "a logit is NaN" in errors["bad"]
    assert sum(len(tokens) for _, name, tokens, _ in now.sent if name == "good") == 3
    assert now.engine.stats.snapshot()["invalid_logits"] == 1


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
