"""Spans of requests: what they say, whose trace they join, where they go."""

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cluster.api import tracing
from cluster.api.app import create_app
from cluster.api.record import Recorder
from cluster.api.tracing import RequestTracer, check_tracing, make_tracer
from cluster.config.errors import ConfigError
from cluster.config.serve_section import TracingConfig
from cluster.metrics.metrics import IngressMetrics
from tests.unit.api_fakes import MODEL, Api, FakeBackend, tiny_tokenizer
from workers.wire.request import RequestOutput, RequestTimes

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class TracedApi(Api):
    """An application whose spans stay in memory."""

    def __init__(self, backend: FakeBackend | None = None):
        super().__init__(backend)
        self.exporter = InMemorySpanExporter()
        tracer = RequestTracer(SimpleSpanProcessor(self.exporter))
        recorder = Recorder(IngressMetrics(), tracer)
        self.app = create_app(lambda: self.backend, tiny_tokenizer(), recorder=recorder)

    def span(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


class TimedBackend(FakeBackend):
    """Its last outputs tell times, as a rank's do."""

    async def generate(self, *args, **kwargs):
        async for output in super().generate(*args, **kwargs):
            if output.finish_reason is None:
                yield output
            else:
                times = RequestTimes(0.5, 0.25, 2.0)
                yield RequestOutput(
                    output.request_id, output.token_ids, output.finish_reason, times=times
                )


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span(stream):
    api = TracedApi(TimedBackend())
    response = api.request(
        "POST",
        "/v1/completions",
        json={"prompt": "abc", "max_tokens": 4, "n": 2, "temperature": 0.5, "stream": stream},
        headers={"x-request-id": "mine"},
    )
    assert response.status_code == 200
    span = api.span()
    assert span.name == "llm_request" and span.kind == SpanKind.SERVER and span.parent is None
    attributes = dict(span.attributes)
    total = attributes.pop("gen_ai.latency.e2e")
    first = attributes.pop("gen_ai.latency.time_to_first_token")
    assert 0 < first <= total == pytest.approx((span.end_time - span.start_time) / 1e9)
    assert attributes.pop("gen_ai.response.id").startswith("cmpl-")
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "phalanx",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.25,
    }
    (event,) = span.events
    assert event.name == "first_token" and span.start_time < event.timestamp < span.end_time
    assert span.status.status_code == StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "phalanx"


def test_a_chat_and_its_name():
    api = TracedApi()
    assert api.chat(max_tokens=3).status_code == 200
    assert api.span().attributes["gen_ai.operation.name"] == "chat"


def test_the_span_joins_the_clients_trace():
    api = TracedApi()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    body = {"prompt": "abc", "max_tokens": 2}
    api.request("POST", "/v1/completions", json=body, headers=headers)
    span = api.span()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT and span.parent.is_remote
    assert span.context.trace_state.get("vendor") == "1"


def test_a_trace_that_the_client_does_not_sample_is_not_recorded():
    api = TracedApi()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    api.request("POST", "/v1/completions", json={"prompt": "abc"}, headers=headers)
    assert not api.exporter.get_finished_spans()


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-0", "\u00e9"])
def test_a_broken_traceparent_begins_a_new_trace(header):
    api = TracedApi()
    headers = {"traceparent": header.encode("latin-1")}
    assert api.request("POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
    assert api.span().parent is None


def test_a_failed_request_is_marked():
    backend = FakeBackend()
    backend.error_output = "no memory"
    api = TracedApi(backend)
    assert api.complete("abc").status_code == 503
    span = api.span()
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes["error.type"] == "EngineDeadError"
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_nobody_wants_traces():
    assert make_tracer(TracingConfig()) is None
    check_tracing(TracingConfig())


class Collector(BaseHTTPRequestHandler):
    """Keeps what an exporter posts."""

    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args) -> None:
        pass


@pytest.fixture
def collector():
    handler = type("Kept", (Collector,), {"received": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("config", "variable", "path"),
    [
        ("{}", "", "/v1/traces"),
        ("{}/", "", "/v1/traces"),
        ("{}/elsewhere/traces", "", "/elsewhere/traces"),
        ("", "{}", "/v1/traces"),
    ],
)
def test_spans_reach_a_collector(collector, monkeypatch, config, variable, path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    url, received = collector
    monkeypatch.setattr(tracing, "CLOSE_S", 60.0)
    if variable:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", variable.format(url))
    tracer = make_tracer(TracingConfig(otlp_endpoint=config.format(url) or None))
    api = TracedApi()
    recorder = Recorder(IngressMetrics(), tracer)
    api.app = create_app(lambda: api.backend, tiny_tokenizer(), recorder=recorder)
    assert api.complete("abc", max_tokens=3).status_code == 200
    tracer.close()
    ((posted_to, body),) = received
    assert posted_to == path
    request = ExportTraceServiceRequest.FromString(body)
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"


def test_a_missing_library_is_a_clear_error():
    script = (
        "import sys\n"
        "sys.modules['opentelemetry.exporter'] = None\n"
        "from cluster.config.serve_section import TracingConfig\n"
        "from cluster.api.tracing import check_tracing\n"
        "check_tracing(TracingConfig())\n"
        "try:\n    check_tracing(TracingConfig(otlp_endpoint='http://localhost:4318'))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serve.tracing.otlp_endpoint" in done.stdout
    assert "pip install opentelemetry-exporter-otlp-proto-http" in done.stdout


def test_an_unknown_protocol_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="'http/json'; expected http/protobuf or grpc"):
        check_tracing(TracingConfig(otlp_endpoint="http://localhost:4318"))
