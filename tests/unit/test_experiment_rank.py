"""One rank of an experiment in this process: a closed loop, arrivals, single steps."""

import time
from dataclasses import replace

import pytest

from cluster.experiments.planned_load import TokenRequests, plan_load
from cluster.experiments.rank_group import rank_loads
from cluster.experiments.rank_loop import RankLoad, RankLoop, RankRequest
from cluster.experiments.rank_steps import time_steps
from cluster.experiments.target import Job
from cluster.experiments.workload_section import RequestWorkload, StepWorkload
from tests.checkpoints.writer import make_checkpoint
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous


@pytest.fixture(scope="module")
def loop() -> RankLoop:
    return RankLoop()


@pytest.fixture(scope="module")
def epoch(tmp_path_factory: pytest.TempPathFactory, loop: RankLoop):
    path = tmp_path_factory.mktemp("rank") / "tiny"
    make_checkpoint(path, num_layers=1, hidden_size=32, num_experts=5)
    config = RankConfig(
        model={"path": str(path), "dtype": "float32", "max_model_len": 256},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 64},
        cache={"num_blocks": 64},
        kernels={},
        num_ranks=1,
        device="cpu",
        threads=1,
        vote_timeout_s=30,
    )
    process = RankProcess(0, config)
    epoch = Epoch(process, Rendezvous("", 0, "experiment-test"), 30)
    epoch.load()
    epoch.start_engine(loop.publish, lambda step: None)
    yield epoch
    epoch.close()
    process.close()


def load(dues: list[float | None], in_flight: int | None, **fields: object) -> RankLoad:
    requests = [RankRequest(i, [1, 2, 3 + i], 4, due) for i, due in enumerate(dues)]
    values = {"begin": time.perf_counter(), "salt": "a", "temperature": 0.0}
    return RankLoad(requests, in_flight, **{**values, "stop_token_ids": frozenset(), **fields})


def test_a_closed_loop_keeps_its_places_filled(epoch: Epoch, loop: RankLoop) -> None:
    asked: list[float | None] = []

    def go_on(due: float | None) -> bool:
        asked.append(due)
        return False

    answers = loop.run(epoch.engine, load([None] * 5, 2), "closed", go_on)
    assert asked == [None]
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert all(
        answer.completion_tokens == 4 == len(answer.chunk_times) for answer in answers.values()
    )
    assert answers[2].started >= min(answers[0].ended, answers[1].ended), "a place became free"
    assert answers[1].started == answers[0].started


def test_requests_arrive_at_their_times(epoch: Epoch, loop: RankLoop) -> None:
    def go_on(due: float | None) -> bool:
        if due is None:
            return False
        time.sleep(max(0.0, due - time.perf_counter()))
        return True

    dues = [0.0, 0.15, 0.3]
    planned = load(dues, None)
    answers = loop.run(epoch.engine, planned, "open", go_on)
    for number, due in enumerate(dues):
        assert answers[number].started == pytest.approx(planned.begin + due)
        assert answers[number].sent >= answers[number].started


def test_a_refused_request_is_an_error(epoch: Epoch, loop: RankLoop) -> None:
    too_long = RankLoad([RankRequest(0, [1] * 300, 4, None)], 1, 0.0, "", 0.0, frozenset())
    (answer,) = loop.run(epoch.engine, too_long, "long", lambda due: False).values()
    assert answer.error and answer.ended


@pytest.mark.parametrize(
    ("in_flight", "numbers", "places"),
    [
        (None, [[0, 3], [1, 4], [2]], [None, None, None]),
        (7, [[0, 3], [1, 4], [2]], [3, 2, 2]),
        (2, [[0, 2, 4], [1, 3], []], [1, 1, 0]),
        (1, [[0, 1, 2, 3, 4], [], []], [1, 0, 0]),
    ],
)
def test_places_are_shared_by_ranks_and_never_exceeded(
    in_flight: int | None, numbers: list, places: list
) -> None:
    workload = RequestWorkload(requests=5, input_len=4)
    load = replace(plan_load(workload, 0, 1), in_flight=in_flight)
    encoded = TokenRequests(load.requests, frozenset())
    loads = rank_loads(Job(workload, load, "", 0), encoded, 3, 0.0)
    assert [[request.number for request in own.requests] for own in loads] == numbers
    assert [own.in_flight for own in loads] == places


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_steps_are_timed(epoch: Epoch, phase: str) -> None:
    tokens = 32 if phase == "prefill" else 4
    found = time_steps(epoch, StepWorkload(phase=phase, tokens=tokens, exchanges=2), seed=0)
    assert set(found) == {"step_ms", "exchange_us", "empty_step_us"}
    assert all(value > 0 for value in found.values())
    assert found["empty_step_us"] < 1e3 * found["step_ms"]


def test_a_step_that_does_not_fit_is_refused(epoch: Epoch) -> None:
    with pytest.raises(ValueError, match="has at most 64"):
        time_steps(epoch, StepWorkload(tokens=65), seed=0)
