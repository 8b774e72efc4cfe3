"""The step loop with ranks as threads: sleeping, waking, stopping and failing, without a model."""

import random
import threading
import time

import numpy as np
import pytest

from kernels.pending import Pending
from tests.unit.schedulers import make_scheduler
from workers.engine.engine import Engine
from workers.step.step_output import StepOutput
from workers.step.step_sync import LockstepError, PlanConfig
from workers.wire.request import EngineRequest, SamplingParams

TIMEOUT_S = 20


def until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class ThreadVotes:
    """Ranks as threads; a rank that waits alone for too long raises, as a real transport does."""

    def __init__(self, num_ranks: int):
        self._rows: list[np.ndarray] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)

    def transport(self, rank: int):
        outer = self

        class One:
            def all_gather(self, row: np.ndarray) -> np.ndarray:
                try:
                    outer._rows[rank] = row
                    outer._barrier.wait(TIMEOUT_S)
                    rows = np.stack(outer._rows)
                    outer._barrier.wait(TIMEOUT_S)
                except threading.BrokenBarrierError as error:
                    raise LockstepError("a rank did not come") from error
                return rows

        return One()


class CountingRunner:
    """A model whose next token is the length of the sequence."""

    def __init__(self) -> None:
        self.num_forwards = 0
        self.fail = self.capturing = False
        self.graphs = None

    def launch(self, batch, plan) -> Pending[StepOutput]:
        self.num_forwards += 1
        if self.fail:
            raise RuntimeError("the forward broke")
        drawing = [part.seq for part in batch.parts if part.num_logits]
        tokens = [seq.num_tokens + seq.num_pending for seq in drawing]
        return Pending.ready(StepOutput.of(batch, tokens))


class Group:
    """Engines on threads, started and stopped together."""

    def __init__(self, num_ranks: int, asynchronous: bool):
        votes = ThreadVotes(num_ranks)
        self.asynchronous = asynchronous
        self.lost_wakes = 0
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, threading.Event] = {}
        self.errors: dict[str, str] = {}
        self.failures: dict[int, BaseException] = {}
        self.engines = [self._engine(rank, votes) for rank in range(num_ranks)]
        self.threads = [
            threading.Thread(target=self._run, args=(r,), daemon=True) for r in range(num_ranks)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, rank: int, name: str, max_tokens: int = 3) -> None:
        self.finished[name] = threading.Event()
        params = SamplingParams(max_tokens=max_tokens)
        self.engines[rank].submit(
            EngineRequest(request_id=name, ingress_id="i", prompt_token_ids=[1, 2], params=params)
        )

    def wait(self, name: str) -> list[int]:
        assert self.finished[name].wait(TIMEOUT_S), f"{name} did not finish"
        return self.outputs[name]

    def wait_asleep(self) -> None:
        """Return when all ranks sleep: a rank that ends a request does so before its peers end the step."""
        until(lambda: all(engine.activity()[1] == "sleep" for engine in self.engines))

    def join(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank did not leave its loop"

    def _engine(self, rank: int, votes: ThreadVotes) -> Engine:
        def wake_peers(step: int) -> None:
            if self.lost_wakes:
                self.lost_wakes -= 1
                return
            for other, engine in enumerate(self.engines):
                if other != rank:
                    engine.wake(step)

        return Engine(
            make_scheduler(),
            CountingRunner(),
            votes.transport(rank),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=wake_peers,
            asynchronous=self.asynchronous,
        )

    def _publish(self, ingress_id: str, outputs) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error:
                self.errors[output.request_id] = output.error
            if output.finish_reason:
                self.finished[output.request_id].set()

    def _run(self, rank: int) -> None:
        try:
            self.engines[rank].run()
        except BaseException as error:
            self.failures[rank] = error


@pytest.fixture(params=[False, True], ids=["in turn", "asynchronous"])
def asynchronous(request) -> bool:
    return request.param


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_one_request_wakes_the_group_and_it_sleeps_again(num_ranks, asynchronous):
    group = Group(num_ranks, asynchronous)
    for round_ in range(3):
        group.submit(round_ % num_ranks, str(round_))
        assert group.wait(str(round_)) == [2, 3, 4]
        group.wait_asleep()
        before = [engine.runner.num_forwards for engine in group.engines]
        time.sleep(0.05)
        assert before == [engine.runner.num_forwards for engine in group.engines]
        assert len(set(before)) == 1 and before[0] == 3 * (round_ + 1)
    group.engines[-1].stop()
    group.join()
    assert not group.failures


def test_random_arrivals_never_lose_a_wake(asynchronous):
    """Requests come at random moments around the edge of sleep; a lost wake would hang the barrier."""
    group = Group(4, asynchronous)
    chance = random.Random(5)
    for index in range(400):
        group.submit(chance.randrange(4), str(index), chance.randint(1, 3))
        if chance.random() < 0.5:
            group.wait(str(index))
        time.sleep(chance.choice([0, 0, 0.0005, 0.002]))
    for index in range(400):
        group.wait(str(index))
    group.engines[chance.randrange(4)].stop()
    group.join()
    assert not group.failures


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_wake_is_sent_again_while_a_rank_waits_in_the_vote(lost, monkeypatch):
    """A TCP reset loses messages; without another wake the vote would run into its time-out."""
    monkeypatch.setattr("workers.engine.engine.REPEAT_WAKE_S", 0.05)
    group = Group(3, False)
    group.submit(0, "first")
    group.wait("first")
    group.wait_asleep()
    group.lost_wakes = lost
    group.submit(1, "a")
    assert group.wait("a") == [2, 3, 4]
    assert group.lost_wakes == 0
    group.engines[0].stop()
    group.join()
    assert not group.failures


def test_wakes_are_repeated_only_while_a_rank_waits(monkeypatch):
    monkeypatch.setattr("workers.engine.engine.REPEAT_WAKE_S", 0.01)
    before, wakes = threading.active_count(), []
    group = Group(2, False)
    for engine in group.engines:
        engine._wake_peers = lambda step, wake=engine._wake_peers: (wakes.append(step), wake(step))
    group.submit(0, "a")
    group.wait("a")
    group.wait_asleep()
    before_sleep = len(wakes)
    time.sleep(0.1)
    assert len(wakes) <= before_sleep + 2, "one of each rank may have been on its way"
    group.engines[0].stop()
    group.join()
    assert threading.active_count() <= before and not group.failures


def test_abort_ends_a_request_silently_and_frees_it(asynchronous):
    group = Group(2, asynchronous)
    runner = group.engines[0].runner
    launch = runner.launch

    def aborted(batch, plan):
        group.engines[0].abort("a")
        group.engines[0].abort("never seen")
        return launch(batch, plan)

    runner.launch = aborted
    group.submit(0, "a", 50)
    group.submit(1, "b", 10)
    group.wait("b")
    group.engines[0].stop()
    group.join()
    assert not group.failures and len(group.outputs.get("a", [])) <= 2
    assert not any(engine.scheduler.has_work for engine in group.engines)


def test_refused_request_is_answered(asynchronous):
    group = Group(2, asynchronous)
    group.submit(1, "long", 10_000)
    assert group.wait("long") == [2 + i for i in range(62)]
    params = SamplingParams(max_tokens=1)
    group.finished["huge"] = threading.Event()
    group.engines[0].submit(
        EngineRequest(request_id="huge", ingress_id="i", prompt_token_ids=[1] * 99, params=params)
    )
    assert group.wait("huge") == []
    group.engines[0].stop()
    group.join()


def broken(*args, **kwargs):
    raise ZeroDivisionError("a bug of ours")


# What breaks, and where it is found in an engine.
PARTS = {
    "drain": ("take", lambda engine: engine._arrivals),
    "schedule": ("schedule", lambda engine: engine.scheduler),
    "commit": ("commit", lambda engine: engine.scheduler),
    "publish": ("send", lambda engine: engine._outbox),
    "statistics": ("record_step", lambda engine: engine.stats),
    "sleep": ("record_idle", lambda engine: engine.stats),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_failure_outside_the_collectives_ends_every_rank_at_once(part, asynchronous):
    """With the reason and the number of the rank on all of them, which a rank that waits in vain would not have."""
    group = Group(3, asynchronous)
    name, owner = PARTS[part]
    setattr(owner(group.engines[1]), name, broken)
    group.submit(1, "a")
    group.join()
    assert set(group.failures) == {0, 1, 2}
    reason = "rank 1: ZeroDivisionError: a bug of ours"
    assert {str(error) for error in group.failures.values()} == {reason}
    assert isinstance(group.failures[1].__cause__, ZeroDivisionError)
    assert group.failures[0].__cause__ is None and group.failures[2].__cause__ is None


def test_a_failure_of_another_thread_ends_a_sleeping_group():
    group = Group(2, False)
    group.wait_asleep()
    group.engines[0].fail(OSError("no socket"))
    group.engines[0].fail(OSError("a later one"))
    group.join()
    assert {str(e) for e in group.failures.values()} == {"rank 0: OSError: no socket"}


def test_a_failure_in_the_last_step_is_not_lost():
    group = Group(1, True)
    group.wait_asleep()
    group.engines[0]._publish_and_record = broken
    group.engines[0].stop()
    group.join()
    assert isinstance(group.failures[0], ZeroDivisionError)


class Alone:
    """One engine, stepped by hand."""

    def __init__(self):
        self.sent: list[tuple[str, str, list[int], str | None]] = []
        self.scheduler = make_scheduler()
        self.engine = Engine(
            self.scheduler,
            CountingRunner(),
            ThreadVotes(1).transport(0),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=lambda step: None,
        )

    def submit(self, name, ingress="i", prompt_tokens=2, **params):
        self.engine.submit(
            EngineRequest(
                request_id=name,
                ingress_id=ingress,
                prompt_token_ids=[1] * prompt_tokens,
                params=SamplingParams(**{"max_tokens": 3, **params}),
            )
        )

    def _publish(self, ingress_id, outputs):
        self.sent += [
            (ingress_id, o.request_id, o.token_ids, o.error) for o in outputs if not o.begins
        ]


def test_a_refused_request_may_be_aborted_in_the_same_drain():
    """Its ingress gives up just then: nothing is left to look up when the refusal is sent."""
    alone = Alone()
    alone.submit("huge", prompt_tokens=99)
    alone.engine.abort("huge")
    alone.submit("gone", ingress="gone", prompt_tokens=99)
    alone.engine.abort_ingress("gone")
    alone.submit("refused", prompt_tokens=99)
    alone.submit("fine")
    for _ in range(4):
        alone.engine.step()
    assert [tokens for _, name, tokens, _ in alone.sent if name == "fine"] == [[2], [3], [4]]
    assert all("prompt of 99 tokens" in e for _, name, _, e in alone.sent if name != "fine")
    assert "refused" not in alone.engine.open_requests
    assert alone.engine.open_requests.report_load("another ingress") == 0


def test_an_id_in_use_is_refused_and_its_request_goes_on():
    alone = Alone()
    alone.submit("a", "first")
    alone.engine.step()
    alone.submit("a", "second")
    for _ in range(3):
        alone.engine.step()
    first = [entry for entry in alone.sent if entry[0] == "first"]
    assert [tokens for _, _, tokens, _ in first] == [[2], [3], [4]]
    (second,) = [entry for entry in alone.sent if entry[0] == "second"]
    assert "request id a is in use" in second[3]
    assert "a" not in alone.engine.open_requests and not alone.scheduler.has_work
    alone.sent.clear()
    alone.submit("a")  # its id is free again
    alone.engine.step()
    assert alone.sent[0][2] == [2]


def test_a_grammar_without_a_compiler_is_refused():
    alone = Alone()
    alone.submit("a", grammar="start: /x/")
    alone.engine.step()
    assert "no grammar compiler" in alone.sent[0][3]


def test_a_request_that_cannot_be_read_is_answered():
    alone = Alone()
    alone.engine.refuse("a", "i", "it has no prompt")
    alone.engine.step()
    assert alone.sent == [("i", "a", [], "it has no prompt")]
