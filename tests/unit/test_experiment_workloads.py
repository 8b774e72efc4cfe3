"""Workloads of experiments: equal seeds give equal bytes; traces, files, phases, skew of arrivals."""

import json
from pathlib import Path

import pytest

from cluster.bench.settings import BenchError
from cluster.bench.stream import Answer
from cluster.experiments.metrics import decode_window, error_of
from cluster.experiments.planned_load import WARMUP, first_requests, plan_load
from cluster.experiments.workload_files import trace_of
from cluster.experiments.workload_section import RequestWorkload

MIXED = {
    "requests": 50,
    "input_len": "lognormal:64:0.8:512",
    "output_len": "lognormal:32:0.6:256",
    "prefix_groups": 4,
    "prefix_tokens": 32,
    "request_rate": 20.0,
}


def planned(repeat: int = 1, seed: int = 0, **keys: object):
    return plan_load(RequestWorkload.model_validate(keys), seed, repeat)


def test_the_same_seed_gives_the_same_bytes() -> None:
    first = planned(**MIXED)
    assert planned(**MIXED).to_bytes() == first.to_bytes()
    # A changed hash means that results of earlier versions are of another workload.
    assert first.digest() == "64503bf985bff6158a0cd652215400169eaa0624088383b7dc61c077b689b7b9"
    others = [planned(seed=1, **MIXED), planned(repeat=2, **MIXED), planned(WARMUP, **MIXED)]
    assert len({load.digest() for load in [first, *others]}) == 4


def test_mixed_lengths_share_prefixes_and_arrive_in_time() -> None:
    load = planned(**MIXED)
    assert load.in_flight is None and load.offsets is not None
    assert load.offsets[0] == 0 and load.offsets == sorted(load.offsets)
    assert 50 / 20 / 2 < load.offsets[-1] < 50 / 20 * 2
    prefixes = {tuple(request.prompt[:32]) for request in load.requests}
    assert len(prefixes) == 4
    assert len({len(request.prompt) for request in load.requests}) > 20
    assert len({request.max_tokens for request in load.requests}) > 10


def test_prefill_alone_has_one_token_and_decode_begins_at_once() -> None:
    assert {r.max_tokens for r in planned(phase="prefill", output_len=64).requests} == {1}
    assert planned(phase="decode", requests=12).in_flight == 12
    assert planned(concurrency=3).in_flight == 3
    assert planned().in_flight == 8
    assert first_requests(planned(), 5).in_flight == 8


def test_a_trace_keeps_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"at": 10.0, "input_len": 7, "output_len": 3},
        {"at": 10.5, "prompt": [1, 2], "max_tokens": 9},
        {"at": 12.0, "prompt": "hello"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = planned(trace=str(path), output_len=5)
    assert load.offsets == [0.0, 0.5, 2.0]
    assert [len(request.prompt) for request in load.requests] == [7, 2, 5]
    assert [request.max_tokens for request in load.requests] == [3, 9, 5]
    assert len(planned(trace=str(path), requests=2).requests) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"input_len": 3}', 'line 1: "at" must be a number'),
        ('{"at": 1, "input_len": 0}', '"input_len" must be a whole number above 0'),
        ('{"at": 2}\n{"at": 1}', "line 2: `at` is before"),
        ("[]", "an object is expected"),
        ("", "has no requests"),
        ('{"at": 1, "prompt": []}', '"prompt" must be a text or a list'),
    ],
)
def test_wrong_traces(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=expected):
        trace_of(str(path))


def test_lines_of_a_file_are_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 3}\n')
    load = planned(prompts=str(path), requests=2, output_len=7)
    assert [(r.prompt, r.max_tokens) for r in load.requests] == [("a", 7), ("b", 3)]


def test_the_decode_window_has_no_prefill() -> None:
    times = [0.1 * (1 + token) for token in range(11)]
    early = Answer(0.0, times[-1], times, 1, 11)
    late = Answer(0.0, 1.5, [time + 0.4 for time in times], 1, 11)
    found = decode_window([early, late])
    assert found["decode_tokens_per_s"] == pytest.approx(2 / 0.1, rel=0.1)
    assert found["decode_ms_per_token"] == pytest.approx(100, rel=0.1)
    assert decode_window([Answer(0.0, 1.0, [0.1], 1, 1), Answer(2.0, 3.0, [2.1], 1, 1)]) == {}


def test_a_load_without_an_answer_is_an_error() -> None:
    good, bad = Answer(0.0, 1.0), Answer(0.0, 1.0, error="HTTP 500")
    assert error_of([good, bad]) is None
    assert error_of([bad, bad]) == "all 2 requests failed: HTTP 500"
