"""The requests of one run, with their arrival times. Pure: workload, seed and repeat decide every byte.

Knows nothing of engines and servers.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.bench.arrivals import arrival_offsets
from cluster.bench.lengths import Lengths
from cluster.bench.load import ARRIVALS
from cluster.bench.prompts import prompt_source, random_ids
from cluster.bench.workload import PlannedRequest, plan_requests
from cluster.experiments.workload_files import prompts_of, trace_of
from cluster.experiments.workload_section import PREFILL_TOKENS, RequestWorkload

WARMUP = 0  # the repeat under which warm-up requests are drawn
TIMEOUT_S = 3600.0  # of one answer; limits.run_s ends a run earlier


@dataclass(frozen=True)
class PlannedLoad:
    """Requests in order. `offsets`: seconds from the start to each arrival; None = closed loop of `in_flight`."""

    requests: list[PlannedRequest]
    offsets: list[float] | None
    in_flight: int | None

    def to_bytes(self) -> bytes:
        """Return the load as JSON; equal loads have equal bytes."""
        rows = [[request.prompt, request.max_tokens] for request in self.requests]
        data = {"requests": rows, "offsets": self.offsets, "in_flight": self.in_flight}
        return json.dumps(data, separators=(",", ":")).encode()

    def digest(self) -> str:
        """Return the hash of the bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def plan_load(workload: RequestWorkload, seed: int, repeat: int) -> PlannedLoad:
    """Return the load of one repeat, counted from 1; WARMUP has prompts of its own. Raises BenchError."""
    index = repeat - 1
    if workload.trace is not None:
        return _trace_load(workload, workload.trace, seed, index)
    load = workload.load(seed, TIMEOUT_S)
    records = prompts_of(workload.prompts) if workload.prompts is not None else []
    requests = plan_requests(load, records, None, index, workload.requests)
    if workload.phase == "prefill":
        requests = [replace(request, max_tokens=PREFILL_TOKENS) for request in requests]
    offsets = None
    if workload.request_rate is not None:
        source = prompt_source(seed, index, ARRIVALS)
        rate = workload.request_rate
        offsets = arrival_offsets(workload.requests, rate, workload.burstiness, source)
    return PlannedLoad(requests, offsets, workload.in_flight)


def first_requests(load: PlannedLoad, count: int) -> PlannedLoad:
    """Return the first requests of a load, all at once; used for warm-up."""
    return PlannedLoad(load.requests[:count], None, load.in_flight or count)


def _trace_load(workload: RequestWorkload, path: str, seed: int, index: int) -> PlannedLoad:
    """Return the requests of a trace at their times; the first request arrives at once."""
    rows = trace_of(path)[: workload.requests]
    lengths = Lengths.parse(workload.input_len), Lengths.parse(workload.output_len)
    requests = []
    for number, row in enumerate(rows):
        source = prompt_source(seed, index, number)
        prompt: Any = row.record.messages or row.record.prompt if row.record else None
        if prompt is None:
            num_tokens = row.input_len or lengths[0].sample(source)
            prompt = random_ids(num_tokens, workload.vocab_size, source)
        max_tokens = row.max_tokens or lengths[1].sample(source)
        if workload.phase == "prefill":
            max_tokens = PREFILL_TOKENS
        requests.append(PlannedRequest(prompt, max_tokens))
    first = rows[0].at
    return PlannedLoad(requests, [row.at - first for row in rows], workload.in_flight)


def in_tokens(requests: Sequence[PlannedRequest], model_path: Path) -> "TokenRequests":
    """Encode texts and chats with the tokenizer of a checkpoint. Imports it only where a prompt is no list of ids."""
    if all(isinstance(request.prompt, list) and _are_ids(request.prompt) for request in requests):
        return TokenRequests(list(requests), frozenset())
    from cluster.api.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_path)
    found = []
    for request in requests:
        prompt: Any = request.prompt
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_special_tokens=True)
        elif not _are_ids(prompt):
            text = tokenizer.render_chat(prompt, {})
            prompt = tokenizer.encode(text, add_special_tokens=False)
        found.append(replace(request, prompt=prompt))
    return TokenRequests(found, tokenizer.eos_token_ids)


@dataclass(frozen=True)
class TokenRequests:
    """Requests with prompts of token ids, and the ids that end an answer; none for random prompts."""

    requests: list[PlannedRequest]
    stop_token_ids: frozenset[int]


def _are_ids(prompt: Sequence[Any]) -> bool:
    return all(isinstance(item, int) for item in prompt)
