"""Request bodies for one server. Knows nothing of connections."""

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
        "model": request.model or target.model,
        "temperature": load.temperature,
        "stream": True,
        **_prompt_fields(load.endpoint, request),
    }
    if load.sampling_seed is not None:
        body["seed"] = load.sampling_seed
    if target.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body | dict(load.extra_body)).encode()


def _prompt_fields(endpoint: str, request: PlannedRequest) -> dict[str, Any]:
    """Return prompt, number of tokens and options of streams, under the names of the endpoint."""
    prompt = request.prompt
    if endpoint == "responses":
        return {"input": prompt, "max_output_tokens": request.max_tokens, "store": False}
    fields: dict[str, Any] = {"max_tokens": request.max_tokens}
    if endpoint != "messages":
        fields["stream_options"] = {"include_usage": True}
    if endpoint == "completions":
        return fields | {"prompt": prompt}
    is_text = isinstance(prompt, str)
    return fields | {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}
