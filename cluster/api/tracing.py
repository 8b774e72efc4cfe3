"""OpenTelemetry traces: one span for each generation request, sent to a collector over OTLP.

A span is made when its request has ended, with the recorded times, so that no work is done for a token. Attributes
have the names of vLLM and of the GenAI conventions. The SDK reads its own OTEL_ variables (sampler, headers,
resource); serve.tracing.otlp_endpoint stands in for OTEL_EXPORTER_OTLP_ENDPOINT.
"""

import logging
import os
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cluster.config.errors import ConfigError, Problem
from kernels.host.owned import start_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from cluster.api.record import RequestRecord
    from cluster.config.serve_section import TracingConfig

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOLS = ("http/protobuf", "grpc")
NANO = 1_000_000_000
CLOSE_S = 2.0


def is_configured(config: "TracingConfig") -> bool:
    """Whether traces are configured."""
    return bool(config.otlp_endpoint) or any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def check_tracing(config: "TracingConfig") -> None:
    """Raise ConfigError if traces are configured, but the exporter's package is missing or its protocol is unknown."""
    if is_configured(config):
        _exporter_class()


def make_tracer(config: "TracingConfig") -> "RequestTracer | None":
    """Return the tracer of one ingress; None without traces. Raises ConfigError, see `check_tracing`."""
    if not is_configured(config):
        return None
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint = config.otlp_endpoint
    exporter_class, is_http = _exporter_class()
    # A collector that is away is worth a line for each batch, not for each attempt.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    options: dict[str, Any] = {}
    if endpoint:
        # The SDK appends this to the endpoint of the environment, but not to one it is given.
        bare = is_http and not urlsplit(endpoint).path.strip("/")
        options["endpoint"] = f"{endpoint.rstrip('/')}/v1/traces" if bare else endpoint
    return RequestTracer(BatchSpanProcessor(exporter_class(**options)))


def _exporter_class() -> tuple[Any, bool]:
    """Return the exporter of the protocol in the environment, and whether the protocol is HTTP."""
    protocol = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        wanted = f"{PROTOCOL_VARIABLES[1]} is {protocol!r}; expected {' or '.join(PROTOCOLS)}"
        raise ConfigError.of("environment", [Problem("serve.tracing", wanted)])
    package = "http" if protocol == PROTOCOLS[0] else "grpc"
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    except ImportError as error:
        install = f"pip install opentelemetry-exporter-otlp-proto-{package}"
        raise ConfigError.of(
            "configuration",
            [
                Problem(
                    "serve.tracing.otlp_endpoint",
                    f"traces are wanted, but their library is missing ({error}): {install}, or unset "
                    f"the key and {' and '.join(ENDPOINT_VARIABLES)}",
                )
            ],
        ) from error
    return module.OTLPSpanExporter, package == "http"


class RequestTracer:
    """Makes spans of ended requests. `close` sends the remaining spans."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The environment's attributes of the service take precedence.
        resource = Resource.create({SERVICE_NAME: "phalanx"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("phalanx")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: "RequestRecord") -> None:
        """Make the span of a request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.time_ns()
        started = now - int((time.perf_counter() - record.generation.started) * NANO)
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in record.scope.get("headers", ())
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=started,
        )
        if span.is_recording():
            span.set_attributes(_attributes(record, (now - started) / NANO))
            first = _first_token_s(record)
            if first is not None:
                span.add_event("first_token", timestamp=started + int(first * NANO))
            if record.error is not None:
                span.set_attribute("error.type", type(record.error).__name__)
                span.set_status(Status(StatusCode.ERROR, str(record.error)))
        span.end(now)

    def close(self) -> None:
        """Send the remaining spans within CLOSE_S, because the exporter would retry for 8 s."""
        start_thread(self._provider.shutdown, _not_sent, "send-spans").join(CLOSE_S)


def _not_sent(error: BaseException) -> None:
    logger.warning("the last spans are not sent: %r", error)


def _first_token_s(record: "RequestRecord") -> float | None:
    return min((c.first_token_s for c in record.choices if c.first_token_s), default=None)


def _attributes(record: "RequestRecord", total_s: float) -> dict[str, Any]:
    generation = record.generation
    params = generation.choices[0].params
    completion_tokens = generation.num_completion_tokens
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if generation.is_chat else "text_completion",
        "gen_ai.provider.name": "phalanx",
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.request.id": record.request_id or generation.response_id,
        "gen_ai.response.id": generation.response_id,
        "gen_ai.request.n": len(generation.choices),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": [choice.reason for choice in record.choices],
        "gen_ai.usage.num_sequences": len(generation.choices),
        "gen_ai.usage.prompt_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": completion_tokens,
        "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.output_tokens": completion_tokens,
        "gen_ai.latency.e2e": total_s,
    }
    first = _first_token_s(record)
    if first is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first
    times = [choice.times for choice in record.choices if choice.times is not None]
    if times:
        # Choices run side by side: the longest is what the client waited for.
        attributes |= {
            "gen_ai.latency.time_in_queue": max(t.queue for t in times),
            "gen_ai.latency.time_in_model_prefill": max(t.prefill for t in times),
            "gen_ai.latency.time_in_model_decode": max(t.decode for t in times),
            "gen_ai.latency.time_in_model_inference": max(t.prefill + t.decode for t in times),
        }
    return attributes
