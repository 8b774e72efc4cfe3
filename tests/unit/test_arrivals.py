"""Notices of the requests that a rank begins, and requests on trial: alone until their first token."""

import random
from concurrent.futures import Future
from itertools import product

import pytest

from kernels.pending import Pending
from tests.unit.schedulers import make_scheduler
from workers.config import SchedulerConfig
from workers.engine import arrivals
from workers.engine.engine import Engine
from workers.engine.vote_transport import LocalVoteTransport
from workers.step.step_output import StepOutput
from workers.step.step_sync import PlanConfig
from workers.wire.request import EngineRequest, SamplingParams


class SlowGrammars:
    """Grammars that are compiled when `finish` is called."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.futures: list[Future] = []

    def ready(self, text):
        return None

    def compile(self, text, done):
        self.waiting.append(done)
        self.futures.append(Future())
        return self.futures[-1]

    def finish(self, compiled) -> None:
        for done in self.waiting:
            done(compiled)
        self.waiting = []


class Rank:
    """An engine that is stepped by hand; `together` are the fresh requests of each launched step."""

    def __init__(self, asynchronous: bool = False):
        self.sent: list[tuple[str, str, int]] = []  # ingress, request, number of tokens
        self.together: list[set[str]] = []
        self.grammars = SlowGrammars()
        self.scheduler = make_scheduler(SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4))
        self.engine = Engine(
            self.scheduler,
            self,
            LocalVoteTransport(),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=lambda step: None,
            grammars=self.grammars,
            asynchronous=asynchronous,
        )

    def launch(self, batch, plan) -> Pending[StepOutput]:
        names = {seq.request.request_id for seq in batch.seqs}
        self.together.append(names & self.engine._arrivals.fresh)
        return Pending.ready(StepOutput.of(batch, [7] * len(batch.logits_seqs)))

    def submit(self, name: str, *, ingress: str = "i", tokens: int = 3, grammar=None, **fields):
        params = SamplingParams(max_tokens=tokens, grammar=grammar)
        length = 20 if name.startswith("long") else 3
        self.engine.submit(
            EngineRequest(
                request_id=name,
                ingress_id=ingress,
                prompt_token_ids=[1] * length,
                params=params,
                **fields,
            )
        )

    def finish(self) -> None:
        while self.engine.step().run:
            pass

    def _publish(self, ingress, outputs) -> None:
        self.sent += [(ingress, it.request_id, len(it.token_ids)) for it in outputs]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "BEGIN_S", 0.0)


@pytest.fixture(params=[False, True], ids=["in turn", "asynchronous"])
def rank(request) -> Rank:
    return Rank(request.param)


def test_a_notice_goes_ahead_of_the_step_that_begins_a_request(rank):
    launch, before = rank.launch, []

    def noting(batch, plan):
        before.append(rank.sent[:])
        return launch(batch, plan)

    rank.launch = noting
    rank.submit("a", tokens=2)
    rank.submit("b", ingress="j", tokens=1)
    rank.finish()
    assert before[0] == [("i", "a", 0), ("j", "b", 0)]
    assert [entry for entry in rank.sent if entry[2]] == [
        ("i", "a", 1),
        ("j", "b", 1),
        ("i", "a", 1),
    ]


def test_a_request_that_waits_is_not_begun(rank):
    for name in "abcdef":
        rank.submit(name, tokens=20)
    for _ in range(4):
        rank.engine.step()
    assert {name for _, name, _ in rank.sent} == set("abcd")


def test_the_compiler_of_grammars_begins_a_request(rank):
    rank.submit("a", grammar="g")
    rank.engine.step()
    assert rank.sent == [("i", "a", 0)]
    rank.grammars.finish("no grammar")
    rank.finish()
    assert not rank.engine._arrivals.fresh


def test_requests_on_trial_are_alone_until_their_first_token(rank):
    """The trials of two ingresses too; requests with a token run on beside them."""
    rank.submit("runs", tokens=20)
    for _ in range(3):
        rank.engine.step()
    for name, ingress in (("t1", "i"), ("long t2", "j"), ("a", "i"), ("b", "j"), ("t3", "i")):
        rank.submit(name, ingress=ingress, on_trial="t" in name)
    rank.finish()
    begun = [fresh for fresh in rank.together if fresh]
    assert {"t1"} in begun and {"long t2"} in begun and {"t3"} in begun and {"a", "b"} in begun
    trials = {"t1", "long t2", "t3"}
    assert all(len(fresh) == 1 for fresh in begun if fresh & trials)
    order = [name for _, name, count in rank.sent if not count]
    assert order == ["runs", "t1", "long t2", "a", "b", "t3"]


def test_no_order_of_events_stops_a_rank_or_joins_a_trial_with_another_request():
    """All short sequences of events and some longer ones; all of length 5 passed by hand."""
    events = ("plain", "trial", "trial with grammar", "abort", "leave", "step", "compiled")
    chance = random.Random(0)
    longer = [tuple(chance.choices(events, k=9)) for _ in range(150)]
    for sequence in (*product(events, repeat=3), *longer):
        rank = Rank(asynchronous=len(set(sequence)) % 2 == 0)
        trials: set[str] = set()
        names: list[str] = []
        for number, event in enumerate(sequence):
            ingress = "ij"[number % 2]
            if event in ("plain", "trial", "trial with grammar"):
                names.append(f"{number}")
                on_trial = event != "plain"
                trials |= {f"{number}"} if on_trial else set()
                grammar = "g" if event.endswith("grammar") else None
                rank.submit(f"{number}", ingress=ingress, on_trial=on_trial, grammar=grammar)
            elif event == "abort" and names:
                rank.engine.abort(names[0])
            elif event == "leave":
                rank.engine.abort_ingress(ingress)
            elif event == "step":
                rank.engine.step()
            elif event == "compiled":
                rank.grammars.finish("no grammar")
        for _ in range(len(sequence) + 1):
            rank.finish()
            rank.grammars.finish("no grammar")
        rank.finish()
        assert not rank.engine._arrivals.fresh and not rank.engine._arrivals._held, sequence
        assert rank.scheduler.cache.pool.usage == 0, sequence
        for fresh in rank.together:
            assert len(fresh) <= 1 or not fresh & trials, sequence


def test_an_abort_cancels_the_compilation():
    rank = Rank()
    rank.submit("a", grammar="g")
    rank.submit("b", grammar="g")
    rank.finish()
    rank.engine.abort("a")
    rank.finish()
    assert [future.cancelled() for future in rank.grammars.futures] == [True, False]


def test_no_request_is_left_waiting_by_a_rank_that_falls_asleep(rank):
    """The only token of the request before it may be read behind the inbox of a step that then has no tokens."""
    for name, on_trial in (("t1", True), ("t2", True), ("a", False), ("t3", True)):
        rank.submit(name, tokens=1, on_trial=on_trial)
    rank.finish()
    while rank.engine._must_vote():
        rank.finish()
    assert [name for _, name, count in rank.sent if count] == ["t1", "t2", "a", "t3"]
