"""What a rank counts: request times, tokens and kinds of steps, the load of its experts."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch

from kernels.routing.expert_load import ExpertLoad, LoadSample
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.schedulers import make_scheduler
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS
from workers.stats.histogram import Histogram
from workers.stats.invalid_logits import InvalidLogits
from workers.stats.process_info import process_info
from workers.stats.request_times import RequestTimer
from workers.stats.stats import EXPERT_LOAD_EVERY, EngineStats, HostTimes
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import PROMPT, VERIFY, ScheduledSequence, Sequence
from workers.step.step_output import RunTimes, StepOutput
from workers.step.step_sync import GraphMode, StepPlan
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams, TokenLogprobs


def sequence(name: str, num_tokens: int = 3, **params) -> Sequence:
    params = SamplingParams(max_tokens=4, **params)
    prompt = list(range(num_tokens))
    return Sequence.from_request(
        EngineRequest(request_id=name, ingress_id="i", prompt_token_ids=prompt, params=params)
    )


class Clock:
    """Stands in for time.perf_counter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def test_histogram_counts_up_to_each_bound_inclusive():
    histogram = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 1.5, 10.0, 11.0):
        histogram.observe(value)
    assert histogram.values() == [2, 2, 1, 24.0]


def test_times_of_one_request(clock):
    timer = RequestTimer()
    timer.arrived("a")
    clock.now += 2
    timer.admitted([sequence("a")])
    clock.now += 3
    first = RequestOutput("a", [1])
    assert timer.committed([first]) == [first]
    clock.now += 1
    timer.admitted([sequence("a")])  # again, after a preemption: it has waited before
    clock.now += 4
    (last,) = timer.committed([RequestOutput("a", [2], "stop")])
    assert last.times == (2, 3, 5)
    assert [h.sum for h in (timer.queue, timer.prefill, timer.decode, timer.inference)] == [
        *(2, 3, 5, 8)
    ]
    assert timer.forget("a") is None


def test_probes_are_neither_timed_nor_counted(clock):
    timer = RequestTimer()
    for name in ("probe-1", "probe-2", "a"):
        timer.arrived(name)
    timer.admitted([sequence("probe-1"), sequence("a")])
    outputs = [RequestOutput("probe-1", [1], "length"), RequestOutput("a", [2], "length")]
    assert timer.num_tokens(outputs) == 1
    timer.committed(outputs)
    assert [histogram.values()[-1] for histogram in (timer.queue, timer.inference)] == [0, 0]
    assert sum(timer.queue.values()[:-1]) == sum(timer.inference.values()[:-1]) == 1
    timer.forget("probe-2")
    assert not timer._probes, "an aborted probe is forgotten"


def test_an_id_in_use_keeps_the_times_of_its_first_request(clock):
    timer = RequestTimer()
    timer.arrived("a")
    timer.admitted([sequence("a")])
    clock.now += 2
    timer.arrived("a")
    timer.committed([RequestOutput("a", [1])])
    assert timer.prefill.sum == 2


def test_request_of_one_token_and_requests_that_never_ran(clock):
    timer = RequestTimer()
    for name in ("one", "aborted", "refused"):
        timer.arrived(name)
    timer.admitted([sequence("one"), sequence("aborted")])
    clock.now += 1
    timer.forget("aborted")
    timer.forget("refused")
    timer.forget("never seen")
    (output,) = timer.committed([RequestOutput("one", [1], "length")])
    assert output.times == (0, 1, 0)
    assert sum(timer.queue.counts) == 2 and sum(timer.inference.counts) == 1
    assert not timer._open and not timer._without_token


def step(
    stats: EngineStats,
    *seqs: Sequence,
    plan: StepPlan | None = None,
    model: Callable[[], LoadSample | None] = lambda: None,
) -> None:
    """One step that samples a token for each of `seqs`; `model` runs in it."""
    scheduler = make_scheduler()
    batch = ScheduledBatch.of([ScheduledSequence(s, PROMPT, s.num_tokens, 1) for s in seqs], seqs)
    plan = plan or StepPlan(True, (batch.num_tokens,))
    stats.before_step(batch, plan)
    output = StepOutput.of(batch, [7] * len(seqs), times=RunTimes(3, 4, 5, 7), expert_load=model())
    host = HostTimes(schedule=1, vote=2)
    stats.record_step(scheduler, batch, plan, host, output, generated=len(seqs), publish=6)


def test_invalid_rows_are_counted_and_logged_by_request(caplog):
    """Rows of prompts and of drawn tokens. Where a rule forbids all tokens, the logits are valid."""
    parts = [
        ScheduledSequence(sequence("none", 3), PROMPT, 2, 0),
        ScheduledSequence(sequence("drafts", 1), VERIFY, 3, 3, (7, 7)),
        ScheduledSequence(sequence("rule", 3, allowed_token_ids=(5,)), PROMPT, 3, 1),
        ScheduledSequence(sequence("prompt", 3), PROMPT, 3, 1),
    ]
    entries = [TokenLogprobs(value, 1, [], []) for value in (math.nan, -1.0, -math.inf, math.nan)]
    counter, batch = InvalidLogits(), ScheduledBatch.of(parts)
    counter.count(batch, StepOutput.of(batch, [7, 7, 5, 5, 5]))
    assert counter.num_rows == 0 and not caplog.records
    drawn, prompts = [7, INVALID_LOGITS, 5, ALL_FORBIDDEN, 5], {"prompt": [None, *entries]}
    counter.count(batch, StepOutput.of(batch, drawn, prompt_logprobs=prompts))
    assert counter.num_rows == 3
    lines = sorted(record.getMessage() for record in caplog.records)
    assert lines == [
        "request drafts: rows of logits with a NaN or an infinity: 1",
        "request prompt: rows of logits with a NaN or an infinity: 2",
    ]


def test_steps_are_counted_by_kind_and_size():
    stats = EngineStats()
    step(stats, sequence("a", 3), sequence("b", 5))
    step(stats)
    plan = StepPlan(True, (5,), padded_tokens=8, graph_mode=GraphMode.DECODE, ubatch=True)
    step(stats, sequence("c", 5), plan=plan)
    found = pickle.loads(pickle.dumps(stats.snapshot()))
    assert found["kinds"] == {
        ("EXTEND", "NONE", "False"): 1,
        ("IDLE", "NONE", "False"): 1,
        ("EXTEND", "DECODE", "True"): 1,
    }
    assert (found["steps"], found["idle_steps"], found["padding_tokens"]) == (3, 1, 3)
    assert (found["prompt_tokens"], found["generation_tokens"]) == (13, 3)
    parts = {"schedule": 3, "vote": 6, "prepare": 9, "forward": 12, "sample": 15, "draft": 21}
    parts["output"] = 18
    assert found["step_seconds"] == parts
    bounds, values = found["histograms"]["step_tokens"]
    assert sum(values[:-1]) == 3 and values[-1] == 13
    assert values[bounds.index(8.0)] == 2 and values[0] == 1
    assert found["process"]["resident_bytes"] > 1e6


def test_expert_load_is_looked_at_now_and_then():
    load = ExpertLoad()
    stats = EngineStats(load)
    looked = 0

    def model() -> LoadSample | None:
        nonlocal looked
        if not load.watching:
            return None
        looked += 1
        load.add(torch.tensor([4, 8, 8, 12], dtype=torch.int32))  # 4, 4, 0 and 4 rows
        load.add(torch.tensor([0, 0, 0, 0], dtype=torch.int32))
        load.add(torch.tensor([2, 4, 6, 8], dtype=torch.int32))
        return LoadSample.of(load.take())

    for _ in range(2 * EXPERT_LOAD_EVERY):
        step(stats, model=model)
    found = stats.snapshot()
    assert looked == 2 and found["expert_rows_sampled"] == 40
    assert found["expert_balancedness"] == pytest.approx((0.75 + 1) / 2)
    assert found["expert_balancedness_samples"] == (2, pytest.approx(0.75 + 1))


def test_expert_load_without_rows_or_layers():
    load = ExpertLoad()
    load.watch()
    assert load.take() is None
    load.watch()
    load.add(torch.zeros(4, dtype=torch.int32))
    assert LoadSample.of(load.take()) is None
    load.watch()
    load.add(torch.zeros(0, dtype=torch.int32))  # a rank without experts
    assert load.take() is None and not load.watching


def test_the_model_reports_while_it_is_watched(tmp_path):
    rank = OneRank(small_checkpoint(tmp_path / "model"))
    load = rank.model.layers[0][1].expert_load
    batch = make_batch([[1, 2, 3, 4, 5]], [0])
    rank.logits(batch)
    assert load.take() is None
    load.watch()
    rank.logits(batch)
    sample = LoadSample.of(load.take())
    # Every expert is here: each token reaches 3 of them in each of 3 layers.
    assert sample.rows == 5 * 3 * 3
    assert 3 / 8 <= sample.balancedness < 1


def test_process_info():
    before = process_info()
    sum(range(3_000_000))
    after = process_info()
    assert after["cpu_seconds"] > before["cpu_seconds"] and after["resident_bytes"] > 10**7
