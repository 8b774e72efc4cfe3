"""The step loop with ranks as threads: sleeping, waking, pausing, stopping and failing, without a model."""

import random
import threading
import time

import numpy as np
import pytest

from kernels.pending import Pending
from workers.config import SchedulerConfig
from workers.engine.engine import Engine
from workers.engine.scheduler import Scheduler
from workers.engine.step_sync import LockstepError, PlanConfig
from workers.runner.step_output import StepOutput
from workers.wire.request import EngineRequest, SamplingParams

TIMEOUT_S = 20


class ThreadExchange:
    """Ranks as threads; a rank that waits alone for too long raises, as a real transport does."""

    def __init__(self, num_ranks: int):
        self._rows: list[np.ndarray] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)

    def of(self, rank: int):
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
        self.fail = False

    def launch(self, batch, plan) -> Pending[StepOutput]:
        self.num_forwards += 1
        if self.fail:
            raise RuntimeError("the forward broke")
        tokens = [
            seq.num_tokens + seq.num_pending
            for seq, samples in zip(batch.seqs, batch.samples, strict=True)
            if samples
        ]
        return Pending.ready(StepOutput(tokens))


class Group:
    """Engines on threads, started and stopped together."""

    def __init__(self, num_ranks: int, asynchronous: bool):
        exchange = ThreadExchange(num_ranks)
        self.asynchronous = asynchronous
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, threading.Event] = {}
        self.failures: dict[int, BaseException] = {}
        self.engines = [self._engine(rank, exchange) for rank in range(num_ranks)]
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

    def join(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank did not leave its loop"

    def _engine(self, rank: int, exchange: ThreadExchange) -> Engine:
        def wake_peers(step: int) -> None:
            for other, engine in enumerate(self.engines):
                if other != rank:
                    engine.wake(step)

        return Engine(
            Scheduler(SchedulerConfig(), num_blocks=64, block_size=4, max_model_len=64),
            CountingRunner(),
            exchange.of(rank),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=wake_peers,
            asynchronous=self.asynchronous,
        )

    def _publish(self, ingress_id: str, outputs) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
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
        time.sleep(0.05)
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


def test_pause_holds_requests_until_resume(asynchronous):
    group = Group(2, asynchronous)
    group.engines[0].pause()
    group.submit(1, "a")
    time.sleep(0.1)
    assert not group.finished["a"].is_set()
    group.engines[0].resume()
    assert group.wait("a") == [2, 3, 4]
    group.engines[0].stop()
    group.join()
    assert not group.failures


def test_abort_ends_a_request_silently_and_frees_it(asynchronous):
    group = Group(2, asynchronous)
    group.engines[0].pause()
    group.submit(0, "a", 50)
    group.submit(1, "b")
    group.engines[0].abort("a")
    group.engines[0].abort("never seen")
    group.engines[0].resume()
    group.wait("b")
    assert "a" not in group.outputs or len(group.outputs["a"]) < 50
    group.engines[0].stop()
    group.join()
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


def test_scheduling_failure_ends_every_rank_and_names_the_one(asynchronous):
    group = Group(2, asynchronous)

    def broken():
        raise ZeroDivisionError("scheduler bug")

    group.engines[1].scheduler.schedule = broken
    group.submit(0, "a")
    group.join()
    assert set(group.failures) == {0, 1}
    assert all("rank 1 reports a failure" in str(error) for error in group.failures.values())
    assert isinstance(group.failures[1].__cause__, ZeroDivisionError)
