"""The settings of the HTTP layer. Knows nothing of the YAML."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.api.images.settings import ImageSettings
from cluster.config.api_keys import KeyDigests
from workers.specs.pooling import PoolingSpec
from workers.stats.versions import phalanx_version


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Limits and defaults of one ingress.

    `default_sampling` holds temperature, top_p, top_k, min_p of the checkpoint's
    generation_config.json (`tokenizer.load_default_sampling`), used where a request has no value.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_json_depth: int = 512
    """Objects and lists within each other in a body."""
    max_prompt_tokens: int | None = None
    """Of one prompt; None = what the model's length leaves room for."""
    max_choices: int = 1024
    """Prompts times n of one request."""
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    """Of one stop string."""
    max_logit_bias: int = 1024
    """Entries of logit_bias."""
    max_allowed_token_ids: int = 16384
    max_bad_words: int = 256
    """Entries of bad_words, each of at most max_stop_chars characters."""
    max_logprobs: int = 20
    """Alternatives of one token: logprobs, top_logprobs and prompt_logprobs."""
    max_tools: int = 128
    max_schema_bytes: int = 256 * 1024
    """Of a JSON schema, regex, grammar or choice list; of all tools' parameters together."""
    max_schema_depth: int = 64
    """Objects and lists within each other in a JSON schema."""
    request_timeout_s: float | None = None
    """From arrival to the last token; None = as long as it takes."""
    client_timeout_s: float = 60.0
    """How long a client may take to send a body."""
    max_open_choices: int | None = None
    """Choices that run or wait in this ingress; more get a 429. None = no limit."""
    keys: KeyDigests = field(default_factory=KeyDigests)
    max_upload_bytes: int = 256 * 1024 * 1024
    """Of all bodies that arrive or are prepared."""
    client_routing: bool = True
    """Clients may set priority and x-data-parallel-rank."""
    separate_prefixes: bool = False
    """Requests of different keys share no prefixes in the cache."""
    cors_origins: tuple[str, ...] = ()
    inline_body_bytes: int = 8 * 1024
    """Larger bodies are parsed, rendered and tokenised in a thread, so that they do not stall running streams."""
    thread_body_bytes: int = 64 * 1024
    """Larger bodies are handled in a process, because a thread holds the interpreter lock for too long in one call."""
    body_cpu_s: float = 60.0
    """Processor time that the process of one body may take."""
    grammar_timeout_s: float = 3.0
    """Processor time of the compilation of one grammar."""
    stats_timeout_s: float = 2.0
    """How long /metrics waits for the ranks before it answers without them."""
    stats_fresh_s: float = 1.0
    """How long answers of /metrics, /ranks and /ready are shared by requests."""
    probe_timeout_s: float = 5.0
    """Seconds that a rank may take for the token of a probe by /ready."""
    probe_fresh_s: float = 10.0
    """Seconds after a successful probe in which /ready sends no other."""
    num_replicas: int = 1
    """Ingresses that share the requests of the server."""
    max_stored_responses: int = 1000
    """Responses of /v1/responses that are kept; 0 = none."""
    max_stored_bytes: int = 64 * 1024 * 1024
    """Memory of the kept responses."""
    tool_parser: str = "auto"
    """Of `tools.FORMATS`; auto = by the chat template."""
    reasoning_parser: str = "auto"
    """Of `serve.reasoning_parser`; auto = by the chat template."""
    images: ImageSettings | None = None
    """Images of requests; None = the model takes text alone."""
    pooling: PoolingSpec | None = None
    """How prompts become vectors or scores; None = the model generates."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    system_fingerprint: str = field(default_factory=lambda: f"phalanx-{phalanx_version()}")

    @property
    def max_request_bytes(self) -> int:
        """Of a body with its images; all else of it has `max_body_bytes`."""
        of_images = 0 if self.images is None else self.images.max_body_bytes
        return max(self.max_body_bytes, of_images)
