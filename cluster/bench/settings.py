"""The settings of a load and their checks. Plain data, written to JSON unchanged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.bench.formats import FORMATS
from cluster.bench.lengths import Lengths
from cluster.bench.stream import StreamFormat

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 64
# Fields that the tool itself decides on: with another value its figures would mean something else.
OWN_FIELDS = (
    *("model", "prompt", "messages", "input", "max_tokens", "max_output_tokens"),
    *("stream", "stream_options", "n"),
)


class BenchError(ValueError):
    """The load cannot run; the message has the reason, or the answer of the server."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load for every server. Lengths in tokens: a number, or a text for `Lengths.parse`.

    Closed loop: `concurrency` requests always in flight. With `request_rate` (requests/s, infinite =
    all at once) open loop: requests arrive on a schedule, and `concurrency`, if any, caps how many
    are in flight. `prompts_file` replaces the random prompts; `output_len` is then the default for
    lines without max_tokens. `models` are names that the requests of a round have in turn, in place
    of the server's own.
    """

    endpoint: Literal["chat", "completions", "responses", "messages"]
    requests: int
    concurrency: int | None
    input_len: int | str
    output_len: int | str
    warmup: int
    rounds: int
    seed: int
    temperature: float
    ignore_eos: bool
    prompts: Literal["auto", "ids", "text"]
    vocab_size: int
    timeout_s: float
    request_rate: float | None = None
    burstiness: float = 1.0
    prefix_groups: int = 0
    prefix_tokens: int = 0
    prompts_file: str | None = None
    sampling_seed: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, value in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            try:
                Lengths.parse(value)
            except ValueError as error:
                raise BenchError(f"{option}: {error}") from error
        for problem in self._problems():
            raise BenchError(problem)

    def _problems(self) -> list[str]:
        found = []
        if self.request_rate is None:
            if self.concurrency is None:
                found.append("a load needs --concurrency or --request-rate")
            if self.burstiness != 1.0:
                found.append("--burstiness has no meaning without --request-rate")
        elif not self.request_rate > 0:
            found.append(f"--request-rate {self.request_rate:g} is not above 0; inf = all at once")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            found.append(f"--burstiness {self.burstiness:g} is not a positive number")
        if bool(self.prefix_groups) != bool(self.prefix_tokens):
            found.append("--prefix-groups and --prefix-tokens go together; give both")
        if self.prefix_groups and self.prompts_file is not None:
            found.append("--prefix-groups is for random prompts, not for those of --prompts")
        for name in OWN_FIELDS:
            if name in self.extra_body:
                found.append(f"--extra-body may not hold {name!r}: the benchmark sets it itself")
        return found

    @property
    def path(self) -> str:
        """The URL path of the endpoint."""
        return FORMATS[self.endpoint].path

    @property
    def stream_format(self) -> StreamFormat:
        """The events of the endpoint's streams."""
        return FORMATS[self.endpoint].stream
