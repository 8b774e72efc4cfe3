"""What a rank counts: request times, tokens and kinds of steps, the load of its experts."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.routing.expert_load import ExpertLoad
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.schedulers import make_scheduler
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS
from workers.stats.drafts import DraftCounts
from workers.stats.expert_counts import KEPT, LayerRows, balancedness
from workers.stats.histogram import Histogram
from workers.stats.invalid_logits import InvalidLogits
from workers.stats.process_info import process_info
from workers.stats.request_times import RequestTimer
from workers.stats.stats import EngineStats, HostTimes
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import PROMPT, VERIFY, ScheduledSequence, Sequence
from workers.step.step_output import RunTimes, StepOutput
from workers.step.step_sync import LOAD_STEPS, GraphMode, StepPlan
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
    expert_counts: np.ndarray | None = None,
) -> None:
    """One step that samples a token for each of `seqs`."""
    scheduler = make_scheduler()
    batch = ScheduledBatch.of([ScheduledSequence(s, PROMPT, s.num_tokens, 1) for s in seqs], seqs)
    plan = plan or StepPlan(True, (batch.num_tokens,))
    stats.before_step(batch, plan)
    output = StepOutput.of(
        batch, [7] * len(seqs), times=lambda: RunTimes(3, 4, 5, 7), expert_counts=expert_counts
    )
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


def test_drafts_are_counted_by_their_place():
    parts = [
        ScheduledSequence(sequence("prompt", 3), PROMPT, 3, 1),
        ScheduledSequence(sequence("one", 1), VERIFY, 3, 3, (7, 7)),
        ScheduledSequence(sequence("all", 1), VERIFY, 4, 4, (7, 7, 7)),
        ScheduledSequence(sequence("none", 1), VERIFY, 2, 2, (7,)),
    ]
    counts, batch = DraftCounts(), ScheduledBatch.of(parts)
    for _ in range(2):
        counts.count(batch, StepOutput.of(batch, [7, 5, 5, 7, 7, 7, 5, 5, 5, 5]))
    assert (counts.num_drafts, counts.num_tokens, counts.accepted) == (6, 12, [4, 2, 2])
    counts.count(ScheduledBatch.of(parts[:1]), StepOutput.of(ScheduledBatch.of(parts[:1]), [5]))
    assert counts.num_drafts == 6


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


def test_the_load_of_experts_is_read_in_pairs_of_steps():
    """A window between every other reading, one step between the readings of a pair."""
    stats, counts = EngineStats(), np.zeros((3, 4), dtype=np.int64)
    for number in range(2 * LOAD_STEPS + 2):
        counts += [[2, 4, 2, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
        counts[0, 3] += 16 * (number == LOAD_STEPS + 1)
        load_step = number if number % LOAD_STEPS < 2 else None
        plan = StepPlan(True, (0,), load_step=load_step)
        step(stats, plan=plan, expert_counts=None if load_step is None else counts.copy())
        if number == 0:
            found = stats.snapshot()
            assert found["expert_rows"] == 12 and found["expert_balancedness"] is None
            assert found["expert_window"] == LayerRows(0, [8, 0, 4])
            assert found["expert_step"] is None
    found = pickle.loads(pickle.dumps(stats.snapshot()))
    assert found["expert_rows"] == 12 * number + 12 + 16
    assert found["expert_window"] == LayerRows(
        2 * LOAD_STEPS, [8 * LOAD_STEPS + 16, 0, 4 * LOAD_STEPS]
    )
    assert found["expert_step"] == LayerRows(2 * LOAD_STEPS + 1, [8, 0, 4])
    assert found["expert_balancedness"] == pytest.approx((0.5 + 1) / 2)
    mixed = (6 / 16 + 1) / 2
    assert found["expert_balancedness_samples"] == (3, pytest.approx(0.75 + mixed + 0.75))
    assert stats.work.total.expert_rows == 12 + 28 + 12
    recent = KEPT * (KEPT * 1 + LOAD_STEPS) + LOAD_STEPS
    assert stats.experts.recent_Ls[2].tolist() == pytest.approx([recent] * 4)


def test_a_reading_without_the_step_before_is_no_step():
    stats = EngineStats()
    counts = np.ones((1, 2), dtype=np.int64)
    step(stats, plan=StepPlan(True, (0,), load_step=1), expert_counts=counts)
    step(stats, plan=StepPlan(True, (0,), load_step=LOAD_STEPS + 1), expert_counts=2 * counts)
    assert stats.snapshot()["expert_step"] is None and stats.snapshot()["expert_rows"] == 4
    step(stats, plan=StepPlan(True, (0,), load_step=64), expert_counts=2 * counts)
    step(stats, plan=StepPlan(True, (0,), load_step=65), expert_counts=2 * counts)
    assert stats.snapshot()["expert_balancedness"] is None, "a step without rows has no balance"


@given(st.data())
def test_rows_are_added_up_by_layer_and_slot_over_ubatches(data):
    num_layers, num_slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    layers = sorted(data.draw(st.sets(st.integers(0, num_layers - 1), min_size=1)))
    num_ubatches = data.draw(st.integers(1, 3))
    load, expected = ExpertLoad(), torch.zeros(num_layers, num_slots, dtype=torch.int64)
    load.allocate(num_layers, num_slots, torch.device("cpu"))
    for _ in range(2):
        load.begin()
        parts = data.draw(st.permutations(layers * num_ubatches))
        for layer in parts:
            rows = data.draw(st.lists(st.integers(0, 9), min_size=num_slots, max_size=num_slots))
            load.add(layer, torch.tensor(rows, dtype=torch.int32).cumsum(0, dtype=torch.int32))
            expected[layer] += torch.tensor(rows)
        load.finish()
        assert not load.counting
    counts = load.counts_Ls
    assert torch.equal(counts, expected)
    load.allocate(num_layers, num_slots, torch.device("cpu"))
    assert load.counts_Ls is counts and not counts.any(), "graphs hold the address"


def test_a_rank_without_experts_counts_nothing():
    load = ExpertLoad()
    load.allocate(3, 0, torch.device("cpu"))
    load.begin()
    assert not load.counting and load.counts_Ls is None
    load.finish()


def test_the_model_counts_tokens_but_no_padding(tmp_path):
    rank = OneRank(small_checkpoint(tmp_path / "model"))
    load = rank.model.layers[0][1].expert_load
    load.allocate(3, 8, torch.device("cpu"))
    batch = make_batch([[1, 2, 3, 4, 5]], [0], padding=3)
    rank.logits(batch)
    assert not load.counts_Ls.any(), "nothing has begun"
    load.begin()
    rank.logits(batch)
    load.finish()
    # Every expert is here: each token reaches 3 of them in each of 3 layers.
    assert load.counts_Ls.sum(1).tolist() == [5 * 3] * 3
    assert 3 / 8 <= balancedness(load.counts_Ls.numpy()) < 1


def test_process_info():
    before = process_info()
    sum(range(3_000_000))
    after = process_info()
    assert after["cpu_seconds"] > before["cpu_seconds"] and after["resident_bytes"] > 10**7
