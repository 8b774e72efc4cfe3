"""OpenAI request bodies for one server. Knows nothing of connections."""

import json
from dataclasses import dataclass
from typing import Any

from cluster.bench.prompts import TextLength
from cluster.bench.settings import Load
from cluster.bench.workload import PlannedRequest


@dataclass(frozen=True, kw_only=True)
class Target:
    """One server and the form of requests that it accepts. `text_length` is None where random prompts are token ids."""

    name: str
    url: str
    model: str
    ignore_eos: bool
    text_length: TextLength | None = None


def request_body(load: Load, target: Target, request: PlannedRequest) -> bytes:
    """Return the JSON of a streamed request; `extra_body` overrides all fields except the benchmark's own."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.endpoint == "completions":
        body["prompt"] = request.prompt
    elif isinstance(request.prompt, str):
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["messages"] = request.prompt
    if load.sampling_seed is not None:
        body["seed"] = load.sampling_seed
    if target.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body | dict(load.extra_body)).encode()
