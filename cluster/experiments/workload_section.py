"""The `workload` section of an experiment: requests of the kinds engine and http, or steps of the kind step.

Knows nothing of prompts and of engines.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.bench.lengths import Lengths
from cluster.bench.prompts_file import Record, check_endpoint
from cluster.bench.settings import BenchError, Load
from cluster.config.errors import Problem
from cluster.experiments.workload_files import prompts_of, trace_of
from workers.section import Section

PREFILL_TOKENS = 1  # output of a prefill-only request: its first token ends it


class RequestWorkload(Section):
    """Requests in a closed loop, in an open loop, or at the times of a trace. Lengths in tokens."""

    requests: int = Field(64, ge=1, description="Requests of one run; of a file: its first ones.")
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Requests in flight; null = 8, and no limit with request_rate or a trace.",
    )
    request_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=True,
        description="Open loop: arrivals per second; .inf = all at once.",
    )
    burstiness: float = Field(1.0, gt=0, description="Shape of the gaps: 1 = Poisson arrivals.")
    input_len: int | str = Field(64, description="N, LOW-HIGH or lognormal:MEDIAN:SIGMA:MAX.")
    output_len: int | str = Field(64, description="N, LOW-HIGH or lognormal:MEDIAN:SIGMA:MAX.")
    phase: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill = one output token each; decode = all at once, figures of the time in which all decode.",
    )
    prefix_groups: int = Field(0, ge=0, description="Shared prefixes before the random prompts.")
    prefix_tokens: int = Field(0, ge=0, description="Length of each shared prefix.")
    prompts: str | None = Field(None, min_length=1, description="JSONL of prompts or messages.")
    trace: str | None = Field(
        None, min_length=1, description="JSONL with `at` in seconds and a prompt or `input_len`."
    )
    vocab_size: int = Field(256, ge=1, description="Random prompt token ids are below this.")
    temperature: float = Field(0.0, ge=0, description="0 = greedy.")
    endpoint: Literal["completions", "chat"] = Field("completions", description="Of kind http.")
    goodput: dict[str, float] = Field(
        default_factory=dict, description="Limits in ms: ttft, tpot, e2e."
    )

    @property
    def files(self) -> list[Path]:
        """The files that the requests depend on."""
        return [Path(path) for path in (self.prompts, self.trace) if path is not None]

    @property
    def in_flight(self) -> int | None:
        """Requests in flight at most; None without a limit."""
        if self.phase == "decode":
            return self.requests
        if self.concurrency is None and self.request_rate is None and self.trace is None:
            return 8
        return self.concurrency

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output. A text counts as one token: its length is not known."""
        longest = (Lengths.parse(text).high for text in (self.input_len, self.output_len))
        default_input, default_output = longest
        pairs = [(self.prefix_tokens + default_input, default_output)]
        if self.trace is not None:
            rows = trace_of(self.trace)[: self.requests]
            pairs = [
                (
                    _num_tokens(row.record) if row.record else row.input_len or default_input,
                    row.max_tokens or default_output,
                )
                for row in rows
            ]
        elif self.prompts is not None:
            records = prompts_of(self.prompts)
            pairs = [(_num_tokens(one), one.max_tokens or default_output) for one in records]
        if self.phase == "prefill":
            pairs = [(prompt, PREFILL_TOKENS) for prompt, _ in pairs]
        return max(map(sum, pairs))

    @property
    def has_random_prompts(self) -> bool:
        """Whether any prompt is drawn below `vocab_size`."""
        if self.trace is not None:
            return any(row.record is None for row in trace_of(self.trace)[: self.requests])
        return self.prompts is None

    def load(self, seed: int, timeout_s: float, cache_salt: str = "") -> Load:
        """Return the load of `cluster.bench` for these requests; raises BenchError."""
        at_times = self.trace is not None
        return Load(
            endpoint=self.endpoint,
            requests=self.requests,
            concurrency=self.in_flight,
            input_len=self.input_len,
            output_len=PREFILL_TOKENS if self.phase == "prefill" else self.output_len,
            warmup=0,
            rounds=1,
            seed=seed,
            temperature=self.temperature,
            ignore_eos=self.prompts is None,
            prompts="ids",
            vocab_size=self.vocab_size,
            timeout_s=timeout_s,
            request_rate=math.inf if at_times else self.request_rate,
            burstiness=self.burstiness,
            prefix_groups=self.prefix_groups,
            prefix_tokens=self.prefix_tokens,
            extra_body={"cache_salt": cache_salt} if cache_salt else {},
            goodput=self.goodput,
        )

    def problems(self) -> Iterator[Problem]:
        """Settings that do not fit together, under `workload.`."""
        for name in ("input_len", "output_len"):
            try:
                Lengths.parse(getattr(self, name))
            except ValueError as error:
                yield Problem(f"workload.{name}", str(error))
                return
        if bool(self.prefix_groups) != bool(self.prefix_tokens):
            text = "prefix_groups and prefix_tokens go together; set both"
            yield Problem("workload.prefix_groups", text)
        if self.burstiness != 1 and self.request_rate is None:
            yield Problem("workload.burstiness", "has no meaning without workload.request_rate")
        if self.trace is not None and self.request_rate is not None:
            yield Problem("workload.request_rate", "the arrivals are those of workload.trace")
        if self.trace is not None and self.prompts is not None:
            yield Problem("workload.prompts", "the prompts are those of workload.trace")
        if self.files and self.prefix_groups:
            yield Problem(
                "workload.prefix_groups", "is for random prompts, not for those of a file"
            )
        if self.phase == "decode" and (self.request_rate is not None or self.trace is not None):
            yield Problem("workload.phase", "decode starts all requests at once, without arrivals")
        if self.phase == "decode" and self.concurrency is not None:
            yield Problem("workload.concurrency", "is workload.requests with phase: decode")
        for name, limit in self.goodput.items():
            if name not in ("ttft", "tpot", "e2e") or limit <= 0:
                yield Problem(f"workload.goodput.{name}", "expected ttft, tpot or e2e above 0 ms")
        yield from self._file_problems()
        try:
            self.load(0, 1.0)
        except BenchError as error:
            yield Problem("workload", str(error))

    def endpoint_problems(self) -> Iterator[Problem]:
        """Lines of a file that the endpoint of kind http refuses."""
        records: list[Record] = []
        if self.prompts is not None:
            records = list(prompts_of(self.prompts))
        elif self.trace is not None:
            records = [row.record for row in trace_of(self.trace) if row.record is not None]
            drawn = Record(0, [0], None, None)
            records += [drawn] if self.has_random_prompts else []
        path = self.prompts or self.trace
        try:
            check_endpoint(str(path), records, self.endpoint)
        except BenchError as error:
            text = str(error).replace("--endpoint", "workload.endpoint:")
            yield Problem("workload.endpoint", text)
        if path is None and self.endpoint == "chat":
            text = "random prompts are token ids, which only completions takes"
            yield Problem("workload.endpoint", text)

    def _file_problems(self) -> Iterator[Problem]:
        for key, path, read in (
            ("workload.prompts", self.prompts, prompts_of),
            ("workload.trace", self.trace, trace_of),
        ):
            if path is None:
                continue
            if not Path(path).is_file():
                yield Problem(key, f"{path} does not exist")
                continue
            try:
                read(path)
            except BenchError as error:
                yield Problem(key, str(error))


class StepWorkload(Section):
    """Steps of one size on every rank, and the all-to-all of one layer at that size."""

    phase: Literal["prefill", "decode"] = Field(
        "prefill", description="Prompts, or one token of each sequence."
    )
    tokens: int = Field(256, ge=1, description="Tokens of the step on each rank.")
    exchanges: int = Field(20, ge=1, description="Dispatches and combines that are timed alone.")

    @property
    def files(self) -> list[Path]:
        """No file."""
        return []

    def problems(self) -> Iterator[Problem]:
        """Nothing depends on two settings."""
        return iter(())


Workload = RequestWorkload | StepWorkload


def _num_tokens(record: Record) -> int:
    return len(record.prompt) if isinstance(record.prompt, list) else 1
