"""Whether the figures of `phalanx bench` are right: known delays in virtual time, and a server's own stamps."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.bench.goodput import measure_goodput, parse_limits
from cluster.bench.metrics import summarise
from cluster.bench.progress import Progress
from cluster.bench.report import build_report, request_rows
from cluster.bench.session import Session, run_session
from cluster.bench.settings import BenchError
from cluster.bench.stream import Answer
from tests.unit.bench_case import answers_of, load, run_virtual, with_server
from tests.unit.bench_server import FakeServer

EVEN = 1e9  # burstiness that makes all gaps alike
TICK_MS = 1.0


def paced(**changes: Any) -> FakeServer:
    """First token after 50 ms, then one each 10 ms."""
    return FakeServer(**{"first_s": 0.05, "step_s": 0.01, "tokens_per_chunk": 1} | changes)


def test_closed_loop_by_known_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = paced(cached_tokens=5)
    session = run_virtual(monkeypatch, {"a": fake}, load(warmup=3))
    (result,) = session.servers[0].results({})
    for latency, expected in (
        (result.ttft_ms, 50.0),
        (result.itl_ms, 10.0),
        (result.worst_gap_ms, 10.0),
        (result.tpot_ms, 10.0),
        (result.e2e_ms, 120.0),
        (result.send_lag_ms, 0.0),
    ):
        for part in (latency.mean, latency.p50, latency.p90, latency.p99, latency.max):
            assert part == pytest.approx(expected, abs=1e-3)
    assert result.duration_s == pytest.approx(3 * 0.12)
    assert (result.completed, result.errors, result.unfinished) == (12, {}, 0)
    assert result.max_in_flight == fake.most_open == 4
    assert (result.output_tokens, result.chunks) == (96, 96)
    assert (result.prompt_tokens, result.cached_tokens) == (12 * 20, 12 * 5)
    assert result.requests_per_s == pytest.approx(12 / 0.36, abs=1e-3)
    assert result.output_tokens_per_s == pytest.approx(96 / 0.36, abs=0.1)
    assert result.total_tokens_per_s == pytest.approx((96 + 240) / 0.36, abs=0.1)


def test_drafts_are_those_that_usage_counts() -> None:
    """Answers without drafts have no counts; without any draft there is no share."""

    def answer(*counts: int | None) -> Answer:
        return Answer(0.0, ended=1.0, accepted_drafts=counts[0], rejected_drafts=counts[1])

    result = summarise([answer(6, 2), answer(None, None), answer(0, 4)], 0.0)
    assert (result.draft_tokens, result.accepted_draft_share) == (12, 0.5)
    for none in ([answer(None, None)], [answer(0, 0)], []):
        assert summarise(none, 0.0).accepted_draft_share is None


def test_the_worst_gap_counts_once_for_each_answer() -> None:
    """Two streams with one long gap each among short ones: no percentile of all gaps shows how each stream fared."""

    def answer(*times: float) -> Answer:
        return Answer(0.0, ended=times[-1], chunk_times=list(times))

    even = [1 + 0.01 * number for number in range(200)]
    answers = [answer(*even, 3.08), answer(*even, 3.03), answer(1.0)]
    result = summarise(answers, 0.0)
    assert result.itl_ms.p50 == pytest.approx(10) and result.itl_ms.p99 == pytest.approx(10)
    assert result.itl_ms.max == result.worst_gap_ms.max == pytest.approx(90)
    assert result.worst_gap_ms.p50 == pytest.approx(65)


def test_tokens_come_from_usage_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = paced(tokens_per_chunk=4)
    session = run_virtual(monkeypatch, {"a": fake}, load(requests=4, warmup=0))
    (result,) = session.servers[0].results({})
    assert (result.chunks, result.output_tokens) == (8, 32)
    assert result.tpot_ms.p50 == pytest.approx(10 / 7, abs=1e-3), "one step of 10 ms for 7 tokens"
    assert result.itl_ms.p50 == pytest.approx(10.0)


def test_open_loop_counts_from_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes one request at a time, 100 ms each, and gets one each 50 ms."""
    fake = paced(first_s=0.1, serial=True)
    settings = load(
        requests=6, output_len=1, warmup=0, concurrency=None, request_rate=20.0, burstiness=EVEN
    )
    session = run_virtual(monkeypatch, {"a": fake}, settings)
    latencies = [1000 * answer.e2e for answer in answers_of(session)]
    assert latencies == pytest.approx([100 + 50 * k for k in range(6)], abs=TICK_MS)
    (result,) = session.servers[0].results({})
    assert result.send_lag_ms.p99 == pytest.approx(0, abs=TICK_MS)
    assert result.duration_s == pytest.approx(0.6, abs=1e-3)


def test_a_cap_in_an_open_loop_hides_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, one in flight: who waits in the client waits as long as in the server."""
    fake = paced(first_s=0.1, serial=True)
    settings = load(requests=5, output_len=1, warmup=0, concurrency=1)
    opened = run_virtual(monkeypatch, {"a": fake}, replace(settings, request_rate=float("inf")))
    answers = answers_of(opened)
    assert [1000 * a.e2e for a in answers] == pytest.approx([100, 200, 300, 400, 500])
    assert [a.sent - a.started for a in answers] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert fake.most_open == 1
    (result,) = opened.servers[0].results({"e2e": 301.0})
    assert result.max_in_flight == 5
    assert result.goodput is not None
    assert result.goodput.share == 0.6
    assert result.goodput.requests_per_s == pytest.approx(3 / 0.5)
    report = build_report(replace(settings, request_rate=float("inf")), opened)
    assert report["load"]["request_rate"] == "inf"
    closed = run_virtual(monkeypatch, {"a": paced(first_s=0.1, serial=True)}, settings)
    assert [a.e2e for a in answers_of(closed)] == pytest.approx([0.1] * 5)


def test_requests_are_sent_at_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(requests=200, request_rate=100.0, concurrency=None, seed=3)
    session = run_virtual(monkeypatch, {"a": paced()}, settings)
    rows = request_rows(session.servers[0])
    assert [row["due_s"] for row in rows] == sorted(row["due_s"] for row in rows)
    assert rows[-1]["due_s"] == pytest.approx(2.0, rel=0.3)
    for row in rows:
        assert 0 <= row["sent_s"] - row["due_s"] <= TICK_MS / 1000
        assert row["ttft_ms"] == pytest.approx(50, abs=TICK_MS)


def test_interruption_keeps_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 120 ms, four at a time, cut after 300 ms: eight are whole."""
    settings = load(rounds=3, warmup=0, prompts="ids", ignore_eos=False)
    probe_s = 0.06
    for changes in ({}, {"request_rate": float("inf")}):
        session = run_virtual(
            monkeypatch, {"a": paced()}, replace(settings, **changes), probe_s + 0.3
        )
        assert session.interrupted
        (result,) = session.servers[0].results({})
        assert (result.completed, result.unfinished, result.errors) == (8, 4, {})
        assert result.duration_s == pytest.approx(0.24)
        assert result.output_tokens_per_s == pytest.approx(64 / 0.24, abs=0.1)
        assert len(request_rows(session.servers[0])) == 8
        report = build_report(settings, session)
        assert report["interrupted"]
        assert len(report["servers"][0]["rounds"]) == 1
    nothing = run_virtual(monkeypatch, {"a": paced()}, settings, 0.01)
    assert nothing == Session([], interrupted=True)


@pytest.mark.parametrize("ticks", range(10))
def test_interruption_at_the_moment_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, ticks: int
) -> None:
    """An answer that ends in the same turn of the loop must not swallow the cancellation."""
    fake = paced(first_s=0.25, step_s=0.25)  # exact in binary: all ends fall on one moment
    settings = load(requests=1000, concurrency=4, warmup=0, output_len=2, ignore_eos=False)
    ends_s = 0.5 + 0.5  # the probe's and the first answer's
    session = run_virtual(monkeypatch, {"a": fake}, settings, ends_s, ticks)
    assert session.interrupted
    assert len(fake.bodies) <= 1 + 4 + 4


def test_figures_agree_with_the_stamps_of_the_server() -> None:
    """Over real sockets: the client sees each event after the server, and soon after it."""
    fake = paced()

    async def measure_both(url: str) -> dict[str, Any]:
        session = await run_session(
            load(warmup=0, prompts="ids", ignore_eos=False),
            {"a": url},
            "fake",
            {},
            Progress(),
        )
        return {"answers": answers_of(session)}

    answers = asyncio.run(with_server(fake, measure_both))["answers"]
    stamps = sorted(fake.stamps[1:], key=lambda each: each.received)  # the first is the probe's
    lags = []
    for answer, stamp in zip(sorted(answers, key=lambda a: a.sent), stamps, strict=True):
        assert answer.sent <= stamp.received
        assert len(answer.chunk_times) == len(stamp.writes) == 8
        for seen, written in zip(answer.chunk_times, stamp.writes, strict=True):
            assert seen >= written
            lags.append(seen - written)
        assert answer.ended >= stamp.writes[-1]
    assert sorted(lags)[len(lags) // 2] < 0.02, (
        "the median: single stalls of the machine are allowed"
    )
    (served,) = [summarise([as_answer(stamp) for stamp in stamps], 0.0)]
    (seen,) = [summarise(answers, 0.0)]
    assert served.ttft_ms.p50 is not None
    assert seen.ttft_ms.p50 == pytest.approx(served.ttft_ms.p50, abs=20)
    assert seen.tpot_ms.p50 == pytest.approx(served.tpot_ms.p50, abs=5)
    assert seen.output_tokens_per_s == pytest.approx(served.output_tokens_per_s, rel=0.2)


def as_answer(stamp: Any) -> Answer:
    return Answer(stamp.received, stamp.done, stamp.writes, 20, len(stamp.writes))


def answer(ttft: float, e2e: float, tokens: int = 11, error: str | None = None) -> Answer:
    return Answer(1.0, 1.0 + e2e, [1.0 + ttft], 10, tokens, error=error)


def test_goodput_by_hand() -> None:
    answers = [
        answer(0.1, 0.6),  # 50 ms a token
        answer(0.2, 0.3),
        answer(0.25, 0.35),  # first token too late
        answer(0.1, 1.2),  # 110 ms a token
        answer(0.1, 0.1, tokens=1),  # has no time per further token
        answer(0.0, 0.0, error="HTTP 500"),
    ]
    limits = parse_limits(["ttft:200, tpot:50", "e2el:1000"])
    assert limits == {"ttft": 200.0, "tpot": 50.0, "e2e": 1000.0}
    goodput = measure_goodput(answers, limits, 2.0)
    assert goodput is not None
    assert goodput.share == 0.5
    assert goodput.requests_per_s == 1.5
    assert goodput.met == {
        "ttft": round(4 / 6, 4),
        "tpot": round(4 / 6, 4),
        "e2e": round(4 / 6, 4),
    }
    assert measure_goodput(answers, {}, 2.0) is None
    nothing = measure_goodput([], limits, 0.0)
    assert nothing is not None
    assert (nothing.share, nothing.requests_per_s) == (None, 0.0)


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:0", "first:20", "ttft:1,ttft:2"]
)
def test_wrong_limits(text: str) -> None:
    with pytest.raises(BenchError, match="--goodput"):
        parse_limits([text])
