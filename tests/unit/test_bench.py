"""`phalanx bench` against a small server of its own, with odd framing, refusals and failures."""

import asyncio
import json
import time
from typing import Any
from unittest import mock

import pytest

from cluster.bench.command import parse_urls
from cluster.bench.formats import FORMATS
from cluster.bench.http import Connection, Endpoint, HttpError
from cluster.bench.metrics import middle, summarise
from cluster.bench.prompts import TextLength, prompt_source, random_text
from cluster.bench.report import build_report
from cluster.bench.settings import BenchError
from cluster.bench.stream import Answer, EventReader
from tests.unit.bench_case import load, run, run_virtual
from tests.unit.bench_server import STEP_S, FakeServer


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses", "messages"])
def test_counts_tokens_by_usage_and_times_the_stream(endpoint: str) -> None:
    fake = FakeServer()
    server = run(fake, endpoint=endpoint)
    median = server["median"]
    assert server["model"] == "fake"
    assert median["completed"] == 12
    assert median["errors"] == {}
    assert median["output_tokens"] == 12 * 8
    assert median["chunks"] == 12 * 4, "two tokens a chunk; role, finish and usage are no output"
    assert median["prompt_tokens"] == pytest.approx(12 * 20, abs=12)
    least = 4 * STEP_S * 1000
    assert median["ttft_ms"]["p50"] >= STEP_S * 1000
    assert median["e2e_ms"]["p50"] >= least
    assert median["duration_s"] >= 3 * least / 1000, "12 requests, 4 at a time"
    assert median["output_tokens_per_s"] == pytest.approx(96 / median["duration_s"], rel=0.01)
    assert fake.most_open == 4


def test_request_bodies() -> None:
    fake = FakeServer()
    run(fake, requests=3, warmup=0, seed=5, rounds=2)
    probe, *bodies = fake.bodies
    assert probe["max_tokens"] == 2
    assert len(bodies) == 6
    for body in bodies:
        assert body["model"] == "fake"
        assert (body["stream"], body["max_tokens"], body["ignore_eos"]) == (True, 8, True)
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 20
        assert max(body["prompt"]) < 256
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert len(set(prompts)) == 6, "no prompt is sent twice, not even in another round"
    again = FakeServer()
    run(again, requests=3, warmup=0, seed=5, rounds=2)
    assert sorted(map(str, again.bodies)) == sorted(map(str, fake.bodies))


def test_connections_are_kept() -> None:
    fake = FakeServer()
    run(fake)
    assert fake.connections <= 1 + 2 + 4, "probes, warm-up, one for each in flight"


@pytest.mark.parametrize("odd", ["crlf", "one_byte_writes", "length_framing"])
def test_any_framing(odd: str) -> None:
    median = run(FakeServer(**{odd: True}), requests=4, warmup=0)["median"]
    assert median["completed"] == 4
    assert (median["output_tokens"], median["chunks"]) == (32, 16)


def test_server_without_usage_has_no_figures_of_tokens() -> None:
    """A chunk may hold no token or many: to count chunks would be to guess."""
    median = run(FakeServer(sends_usage=False), requests=4)["median"]
    assert (median["completed"], median["chunks"]) == (4, 16)
    assert median["requests_per_s"] > 0
    assert median["ttft_ms"]["p50"] > 0
    for key in ("output_tokens", "prompt_tokens", "output_tokens_per_s", "total_tokens_per_s"):
        assert median[key] is None
    assert median["tpot_ms"]["p50"] is None


def test_falls_back_to_what_the_server_takes() -> None:
    server = run(FakeServer(takes_ignore_eos=False))
    assert (server["prompts"], server["ignore_eos"]) == ("token ids", False)
    fake = FakeServer(takes_ignore_eos=False, takes_ids=False)
    server = run(fake)
    assert (server["prompts"], server["ignore_eos"]) == ("text", False)
    assert server["median"]["errors"] == {}
    assert server["median"]["prompt_tokens"] == 12 * 20
    assert isinstance(fake.bodies[-1]["prompt"], str)


def test_wanted_form_of_prompt() -> None:
    assert run(FakeServer(), prompts="text")["prompts"] == "text"
    with pytest.raises(BenchError, match="HTTP 422"):
        run(FakeServer(takes_ids=False), prompts="ids")


def test_compared_servers_get_the_same_form_of_prompt_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a round's ratio is to the base's round of the same number."""
    order: list[str] = []
    first = FakeServer(status=lambda index: order.append("first") or 200)
    second = FakeServer(
        status=lambda index: order.append("second") or 200, takes_ids=False, first_s=3 * STEP_S
    )
    settings = load(requests=4, rounds=3, warmup=0)
    session = run_virtual(monkeypatch, {"a": first, "b": second}, settings)
    base, other = build_report(settings, session)["servers"]
    assert [base["prompts"], other["prompts"]] == ["text", "text"]
    assert [len(base["rounds"]), len(other["rounds"])] == [3, 3]
    assert "ratios" not in base
    assert other["ratios"]["ttft_ms.p50"] == pytest.approx({"median": 3, "low": 3, "high": 3})
    assert other["ratios"]["requests_per_s"]["median"] == pytest.approx(4 / 6, abs=1e-3)
    assert "goodput.requests_per_s" not in other["ratios"]
    turns = ["first", "second", "second", "first", "first", "second"]
    assert order[-24:] == [name for name in turns for _ in range(4)]


def test_errors_are_counted_by_kind() -> None:
    # the probe is request 0
    refusing = FakeServer(status=lambda index: 429 if index % 3 == 2 else 200)
    median = run(refusing, requests=9, warmup=0)["median"]
    assert (median["completed"], median["errors"]) == (6, {"HTTP 429": 3})
    assert median["output_tokens"] == 6 * 8
    broken = run(FakeServer(break_off=True), requests=3, warmup=0)["median"]
    assert (broken["completed"], broken["errors"]) == (0, {"connection closed": 3})
    failing = run(FakeServer(error_event=True), requests=3, warmup=0)["median"]
    assert failing["errors"] == {"stream: server_error": 3}


def test_an_answer_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(requests=1, warmup=0, output_len=60, timeout_s=15 * STEP_S)
    session = run_virtual(monkeypatch, {"a": FakeServer()}, settings)
    (result,) = session.servers[0].results({})
    assert (result.completed, result.errors) == (0, {"timeout": 1})


def test_server_that_refuses_every_form() -> None:
    with pytest.raises(BenchError, match=r"refuses /v1/completions: HTTP 400.*says no"):
        run(FakeServer(status=lambda index: 400))
    with pytest.raises(BenchError, match="HTTP 401"):
        run(FakeServer(status=lambda index: 401))
    with pytest.raises(BenchError, match=r"HTTP 401.*OPENAI_API_KEY.*--api-key-env"):
        run(FakeServer(models_status=401))


def test_connection_refused() -> None:
    async def ask() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        connection = Connection(Endpoint.parse(f"http://127.0.0.1:{port}"), {})
        with pytest.raises(HttpError, match="cannot connect"):
            await connection.request("GET", "/v1/models", timeout_s=5)

    asyncio.run(ask())


def test_parse_urls() -> None:
    assert parse_urls(["a=http://h:1/v1", "http://h:2/x?y=z"]) == {
        "a": "http://h:1/v1",
        "http://h:2/x?y=z": "http://h:2/x?y=z",
    }
    assert Endpoint.parse("http://h:1/v1/") == Endpoint.parse("h:1")
    assert Endpoint.parse("https://h/base/v1") == Endpoint("h", 443, "/base", True)


@pytest.mark.parametrize(
    ("endpoint", "event"),
    [
        ("chat", {"error": {"type": "server_error", "message": "no"}}),
        ("responses", {"type": "error", "code": "server_error", "message": "no"}),
        ("responses", {"type": "response.failed", "response": {"error": {"code": "server_error"}}}),
        ("messages", {"type": "error", "error": {"type": "server_error", "message": "no"}}),
    ],
)
def test_an_error_in_a_stream_is_recorded(endpoint: str, event: dict[str, Any]) -> None:
    answer = Answer(0.0)
    reader = EventReader(answer, FORMATS[endpoint].stream)
    reader.feed(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n", 0.0)
    assert answer.error is not None and answer.error.startswith("stream: ")
    assert "error" in answer.error and not answer.chunk_times


def test_events_split_anywhere() -> None:
    """However the bytes are cut, the figures are the same."""
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    token = b'data: {"choices":[{"delta":{"content":"\\n\\ndata: {}"},"finish_reason":null}]}\n\n'
    finish = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    usage = b'data: {"choices":[],"usage": {"prompt_tokens":5,"completion_tokens":7}}\n\n'
    stream = b": ping\n\n" + role + 3 * token + finish + usage + b"data: [DONE]\n\n"
    for size in range(1, len(stream), 7):
        for text in (stream, stream.replace(b"\n", b"\r\n")):
            answer = Answer(0.0)
            reader = EventReader(answer, FORMATS["chat"].stream)
            for start in range(0, len(text), size):
                reader.feed(text[start : start + size], float(start))
            assert len(answer.chunk_times) == 3, size
            assert (answer.prompt_tokens, answer.completion_tokens) == (5, 7)
            assert answer.error is None
            assert sorted(answer.chunk_times) == answer.chunk_times


def test_summary_by_hand() -> None:
    def answer(started: float, chunks: list[float], ended: float, tokens: int | None) -> Answer:
        return Answer(started, ended, chunks, 10, tokens)

    failed = Answer(0.0, 9.0, [], error="HTTP 500")
    cut_off = Answer(8.0)
    result = summarise(
        [answer(0.0, [1.0, 2.0], 3.0, 5), answer(1.0, [1.5], 4.0, 1), failed, cut_off],
        client_cpu_s=0.3,
    )
    assert result.duration_s == 9.0
    assert (result.completed, result.errors, result.unfinished) == (2, {"HTTP 500": 1}, 1)
    assert result.max_in_flight == 3
    assert (result.output_tokens, result.prompt_tokens, result.chunks) == (6, 20, 3)
    assert result.requests_per_s == pytest.approx(2 / 9, abs=1e-3)
    assert result.total_tokens_per_s == pytest.approx(26 / 9, abs=0.1)
    assert result.ttft_ms.mean == 750.0
    assert result.tpot_ms.p50 == 500.0, "one token has no time per token after the first"
    assert result.itl_ms.p99 == 1000.0
    assert result.e2e_ms.p50 == 3000.0
    assert result.client_us_per_chunk == 100_000.0
    other = summarise([answer(0.0, [0.5], 1.0, 2)], client_cpu_s=0.0)
    both = middle([result, other, other])
    assert both["output_tokens"] == 2
    assert both["errors"] == {"HTTP 500": 1}
    assert both["ttft_ms"]["mean"] == 500.0
    assert both["itl_ms"]["p50"] == 1000.0, "rounds without a figure do not count"


def test_text_of_a_wanted_length() -> None:
    fit = TextLength.fit([(60, 25), (240, 70)])
    assert fit.letters_for(100) == 360
    text = random_text(360, prompt_source(0, 0, 0))
    assert len(text) == 360
    assert text == text.strip()
    assert text != random_text(360, prompt_source(0, 1, 0))


def test_client_cost_of_a_chunk() -> None:
    """The client shares its cores with the server: reading a chunk must stay cheap."""
    event = b'data: {"id":"x","choices":[{"index":0,"text":"abc","finish_reason":null}]}\n\n'
    framed = b"%x\r\n%s\r\n" % (len(event), event)
    connection = Connection(Endpoint.parse("http://h:1"), {})
    answer = Answer(0.0)

    async def feed() -> float:
        connection.connection_made(mock.Mock(is_closing=lambda: False))
        sink = EventReader(answer, FORMATS["chat"].stream).feed
        request = connection.request("POST", "/", timeout_s=60, sink=sink)
        response = asyncio.ensure_future(request)
        await asyncio.sleep(0)
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        costs = []  # the least one is without garbage collections
        for _ in range(10):
            started = time.thread_time()
            for _ in range(500):
                connection.data_received(framed)
            costs.append((time.thread_time() - started) / 500)
        connection.data_received(b"0\r\n\r\n")
        await response
        return min(costs)

    assert asyncio.run(feed()) < 50e-6  # 2 us here; a JSON parse and an HTTP library cost 60
    assert len(answer.chunk_times) == 5000
