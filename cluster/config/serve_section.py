"""The `serve` section of the YAML: HTTP endpoint, access control, limits, shutdown, logs.

Knows nothing of the code that enforces it.
"""

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.images_section import ImagesConfig
from cluster.config.videos_section import VideosConfig
from workers.log import LogFormat, LogLevel
from workers.section import Auto, Section

_Domain = Annotated[
    str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9a-fA-F:]+\](:\d{1,5})?)$")
]
_Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]
QUEUE_DEPTH = 8
MIN_QUEUED = 1024
PREFIX_LEAD = 8.0
"""Simulated sessions in turns (`scripts.bench.sticky`, docs/results/sticky-simulation.json): up to 8 each larger lead
finds more prefixes and shortens the time to the first token; beyond 8 prefixes gain little, and ranks differ more."""


class LimitsConfig(Section):
    """Limits of one request. A request beyond a limit gets a 4xx error that names the limit."""

    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, description="Largest request body; larger ones get a 413."
    )
    max_upload_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Bytes of all bodies that arrive or are prepared in one HTTP process. More end the oldest upload "
        "of over 5 s with a 408; without one, the new request gets a 429.",
    )
    max_connections: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="Open connections of one HTTP process; more get a 503. auto = three quarters of its limit of open "
        "files, at most 16,384.",
    )
    max_json_depth: int = Field(
        512, ge=8, le=512, description="Objects and lists within each other in a body."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Tokens of one prompt; null = what model.max_model_len allows."
    )
    max_choices: int = Field(1024, ge=1, description="Prompts times n of one request.")
    max_stop_strings: int = Field(16, ge=0, description="Entries of stop.")
    max_stop_chars: int = Field(1024, ge=1, description="Characters of one stop string.")
    max_logit_bias: int = Field(1024, ge=0, description="Entries of logit_bias.")
    max_allowed_token_ids: int = Field(
        16384, ge=0, description="Different ids in allowed_token_ids."
    )
    max_bad_words: int = Field(
        256, ge=0, description="Entries of bad_words, each of at most max_stop_chars characters."
    )
    max_logprobs: int = Field(
        20,
        ge=0,
        le=1000,
        description="Alternatives of a token in logprobs, top_logprobs and prompt_logprobs.",
    )
    rebuild_wait_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that a new request waits for ranks that rebuild; then it gets a 503.",
    )
    max_tools: int = Field(128, ge=0, description="Entries of tools.")
    max_schema_bytes: int = Field(
        256 * 1024,
        ge=16,
        description="Size of a JSON schema, regex, grammar or list of choices; all tools together.",
    )
    max_schema_depth: int = Field(
        64, ge=1, description="Objects and lists within each other in a JSON schema."
    )
    grammar_timeout_s: float = Field(
        3.0,
        gt=0,
        description="Processor seconds that the compilation of a JSON schema or grammar may take; more get a 400.",
    )
    request_timeout_s: float | None = Field(
        3600.0,
        gt=0,
        description="Seconds from arrival to the last token, then a 504, or an error at the end of a "
        "stream; null = as long as it takes.",
    )
    client_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds a client may take to send a request, or to take what was sent to it.",
    )
    keep_alive_s: float = Field(
        75.0, gt=0, description="Seconds an idle connection stays open for the next request."
    )


class AccessConfig(Section):
    """What a key of a client may do. Keys of operators have no limits, and neither have clients without keys."""

    client_routing: Auto | bool = Field(
        "auto",
        description="Clients may set priority and x-data-parallel-rank; otherwise operators alone. "
        "auto = while there is at most one key of clients.",
    )
    separate_prefixes: Auto | bool = Field(
        "auto",
        description="Requests of different keys share no prefixes in the KV cache, so the time of an answer shows no "
        "client what others sent. auto = where there are several keys.",
    )
    max_requests: int | None = Field(
        None, ge=1, description="Open requests of one key in one HTTP process; more get a 429."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens and max_tokens of the open requests of one key in one HTTP process; more get a 429.",
    )


class ResponsesStoreConfig(Section):
    """Responses of /v1/responses in memory, for previous_response_id, GET and background. Off with several replicas."""

    max_responses: int = Field(
        1000, ge=0, description="Kept responses; the least recently used leave first. 0 = none."
    )
    max_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="Memory of the kept responses and their conversations."
    )


class TracingConfig(Section):
    """OpenTelemetry traces, one span a request; needs the `tracing` extra."""

    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]",
        description="Collector to send traces to, such as http://localhost:4318; null = the value of "
        "OTEL_EXPORTER_OTLP_ENDPOINT; without one, no traces.",
    )


class ServeConfig(Section):
    """The HTTP endpoint."""

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 = all interfaces."
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    replicas: int = Field(1, ge=1, description="Processes that parse, tokenise and stream.")
    model_name: str | None = Field(
        None,
        min_length=1,
        description="The model's name in the API; null = the checkpoint folder's name.",
    )
    app_name: str = Field(
        "phalanx",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$",
        description="Name of the Ray Serve application; one per cluster.",
    )
    api_keys_file: str | None = Field(
        None,
        min_length=1,
        description="File with an API key a line, # starts a comment; relative to the YAML's folder. "
        "Keys in the environment variable PHALANX_API_KEY count too; without any key, requests need none.",
    )
    access: AccessConfig = Field(default_factory=AccessConfig)
    tls_cert_file: str | None = Field(
        None,
        min_length=1,
        description="Certificate chain in PEM for HTTPS, on the nodes of the HTTP processes; relative to the YAML's "
        "folder; null = HTTP.",
    )
    tls_key_file: str | None = Field(
        None, min_length=1, description="The certificate's private key in PEM, without a password."
    )
    cors_origins: list[_Origin] = Field(
        default_factory=list,
        description="Origins of web pages that may call the API, such as https://chat.example; * = all.",
    )
    prefix_lead: float = Field(
        PREFIX_LEAD,
        ge=0,
        le=1000,
        description="Requests of a prompt's size by which the rank that holds its prefix may be ahead of other ranks "
        "and still gets it, so that a session stays with its rank; beyond them load alone decides. 0 = it always does.",
    )
    max_queued_requests: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="Choices that may wait beyond those that can run; more get a 429. auto = "
        f"{QUEUE_DEPTH} for each that can run (cluster.ranks * scheduler.max_num_seqs), "
        f"at least {MIN_QUEUED}.",
    )
    stats_fresh_s: float = Field(
        1.0,
        ge=0,
        description="Seconds for which one look at the ranks answers all requests to /metrics, /ranks and /ready.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that running requests get to finish after SIGTERM; SIGINT gives none.",
    )
    log_level: LogLevel = Field(
        "info", description="How much the server writes to its log, on standard error."
    )
    log_format: LogFormat = Field(
        "text", description="Form of log lines; json = one object a line, for collectors."
    )
    access_log: bool = Field(
        False,
        description="An info line for each request that ended; otherwise at debug, failures as warnings.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="File with a chat template in Jinja, in place of the checkpoint's; relative to the "
        "YAML's folder. The parsers below detect their formats in it.",
    )
    tool_parser: Literal[
        "auto",
        "hermes",
        "json",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "glm45",
        "minimax_m2",
        "qwen3_coder",
        "granite",
        "mistral",
        "harmony",
    ] = Field(
        "auto",
        description="How the model writes tool calls: hermes = JSON in <tool_call> tags, json = as plain "
        "JSON, deepseek_v3 (also R1), deepseek_v31, kimi_k2, glm45, minimax_m2, granite, "
        "mistral (Mixtral-8x22B) and qwen3_coder (also Qwen3.5) = as these models do, "
        "harmony = the channels of gpt-oss, also for reasoning and content; "
        "auto = the format that the chat template writes, json if it writes none of these.",
    )
    reasoning_parser: Literal["auto", "none", "think", "ernie45"] = Field(
        "auto",
        description="think = what stands between <think> and </think> is the message's reasoning; "
        "ernie45 = think, and the answer stands between <response> and </response>; "
        "auto = ernie45 or think where the chat template has those tags.",
    )
    allowed_media_domains: list[_Domain] = Field(
        default_factory=list,
        description="Hosts from which the server fetches images and videos that requests name by http(s) URLs, such as "
        "images.example, *.example.com for all hosts below, host:8443 for another port, * for all hosts; never from "
        "addresses that are not public. Empty = from none.",
    )
    allowed_media_folder: str | None = Field(
        None,
        min_length=1,
        description="Folder below which requests may name images and videos by file:// URLs, on the nodes of the HTTP "
        "processes; relative to the YAML's folder; null = none.",
    )
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    videos: VideosConfig = Field(default_factory=VideosConfig)
    responses_store: ResponsesStoreConfig = Field(default_factory=ResponsesStoreConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)


def open_choices_limit(serve: ServeConfig, num_running: int) -> int:
    """Choices that one ingress admits at once: its share of the running choices and of the queue."""
    if serve.max_queued_requests == "auto":
        queued = max(QUEUE_DEPTH * num_running, MIN_QUEUED)
    else:
        queued = serve.max_queued_requests
    return -(-(num_running + queued) // serve.replicas)
