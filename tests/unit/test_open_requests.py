"""Whose requests are open, and that every ingress hears in time what the others have on a rank."""

import threading
import time

import pytest

from kernels.pending import Pending
from tests.unit.schedulers import make_scheduler
from workers.engine.engine import Engine
from workers.engine.open_requests import OpenRequests
from workers.engine.outbox import LOAD_INTERVAL_STEPS
from workers.step.step_output import StepOutput
from workers.step.step_sync import PlanConfig
from workers.wire.request import MAX_EXPECTED_OUTPUT, EngineRequest, SamplingParams


def request(name: str, ingress: str, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        ingress_id=ingress,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=max_tokens),
    )


def test_each_ingress_is_told_what_the_others_have():
    requests = OpenRequests()
    requests.add(request("a1", "a"))
    assert requests.report_load("a") == 0 and requests.report_load("b") == 8
    requests.add(request("b1", "b", max_tokens=7))
    assert requests.stale_ingresses() == ["a"]  # b still has 8 of others
    assert requests.report_load("a") == 10 and requests.stale_ingresses() == []
    assert requests.remove("a1") == "a" and requests.stale_ingresses() == ["b"]
    assert requests.ingress_of("b1") == "b" and "a1" not in requests
    assert requests.remove("b1") == "b"
    assert requests.report_load("a") == requests.report_load("b") == 0


def test_an_ingress_that_is_gone_is_told_nothing():
    requests = OpenRequests()
    requests.add(request("a1", "a"))
    requests.add(request("b1", "b"))
    assert requests.ids_of_ingress("a") == ["a1"]
    requests.remove("a1")
    requests.remove_ingress("a")
    requests.remove_ingress("never seen")
    assert requests.stale_ingresses() == [] and requests.report_load("b") == 0


def test_an_id_in_use_is_our_bug():
    requests = OpenRequests()
    requests.add(request("a", "i"))
    with pytest.raises(AssertionError, match="a is in use"):
        requests.add(request("a", "j"))


class OneRank:
    """An engine alone, its messages, and the load that each of them would carry."""

    graphs = None

    def __init__(self) -> None:
        self.loads: list[tuple[str, int, int]] = []  # ingress, load of others, number of outputs
        self.engine = Engine(
            make_scheduler(max_model_len=128),
            self,
            self,
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=lambda step: None,
        )

    def all_gather(self, row):
        return row[None]

    def launch(self, batch, plan) -> Pending[StepOutput]:
        return Pending.ready(StepOutput.of(batch, [7] * len(batch.logits_seqs)))

    def _publish(self, ingress_id, outputs) -> None:
        load = self.engine.open_requests.report_load(ingress_id)
        self.loads.append((ingress_id, load, len(outputs)))


def test_news_comes_with_tokens_and_without():
    rank = OneRank()
    rank.engine.submit(request("short", "a", max_tokens=2))
    rank.engine.submit(request("long", "b", max_tokens=60))
    for _ in range(2):
        rank.engine.step()
    # In its last message `short` counts no more, and `b` hears of it with its next token.
    notices = [("a", 63, 1), ("b", 5, 1)]
    assert rank.loads == [*notices, ("a", 63, 1), ("b", 5, 1), ("a", 63, 1), ("b", 0, 1)]
    rank.loads.clear()
    rank.engine.submit(request("more", "b", max_tokens=3))
    for _ in range(LOAD_INTERVAL_STEPS):
        rank.engine.step()
    assert [entry for entry in rank.loads if entry[0] == "a"] == []  # 63 again when there was time
    rank.loads.clear()
    rank.engine.abort("long")
    for _ in range(LOAD_INTERVAL_STEPS):
        rank.engine.step()
    assert rank.loads == [("a", 0, 0)]


def test_before_it_sleeps_a_rank_tells_who_does_not_know():
    rank = OneRank()
    rank.engine.submit(request("longer", "a", max_tokens=2))
    rank.engine.submit(request("short", "b", max_tokens=1))
    thread = threading.Thread(target=rank.engine.run, daemon=True)
    thread.start()
    for _ in range(1000):
        if len(rank.loads) == 6:
            break
        time.sleep(0.01)
    rank.engine.stop()
    thread.join(10)
    notices = [("a", 4, 1), ("b", 5, 1)]
    assert rank.loads == [*notices, ("a", 0, 1), ("b", 5, 1), ("a", 0, 1), ("b", 0, 0)]


def test_nothing_is_said_to_the_only_ingress_and_to_one_that_is_gone():
    rank = OneRank()
    rank.engine.submit(request("one", "a", max_tokens=40))
    for _ in range(2 * LOAD_INTERVAL_STEPS):
        rank.engine.step()
    assert all(entry == ("a", 0, 1) for entry in rank.loads)
    rank.engine.submit(request("two", "b", max_tokens=40))
    rank.engine.step()
    rank.loads.clear()
    rank.engine.abort_ingress("b")
    for _ in range(2):
        rank.engine.step()
    assert rank.loads == [("a", 0, 1)] * 2


def test_a_request_without_a_limit_does_not_outweigh_all_others():
    requests = OpenRequests()
    requests.add(request("chat", "a", max_tokens=100_000))
    assert requests.report_load("b") == 3 + MAX_EXPECTED_OUTPUT
    requests.remove("chat")
    assert requests.report_load("b") == 0
