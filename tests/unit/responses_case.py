"""What tests of /v1/responses share: events of a stream, judged by the types of the openai package."""

import json
from typing import Any, get_args

import httpx
from openai import BaseModel
from openai.types.responses import Response, ResponseStreamEvent

from tests.unit.api_fakes import Api

EVENTS = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}


def respond(api: Api, value: Any = "hi", **fields: Any) -> httpx.Response:
    return api.post("/v1/responses", {"input": value, **fields})


def whole(api: Api, value: Any = "hi", **fields: Any) -> dict[str, Any]:
    """The response object, judged."""
    response = respond(api, value, **fields)
    assert response.status_code == 200, response.text
    return judged(response.json())


def streamed(api: Api, value: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, judged."""
    response = respond(api, value, stream=True, **fields)
    assert response.status_code == 200, response.text
    return stream_events(response)


def stream_events(response: httpx.Response, first: int = 0) -> list[dict[str, Any]]:
    """The events of a stream: framing, sequence numbers, types and fields are right."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.content.split(b"\n\n")
    assert rest == b""
    found = []
    for part in parts:
        name, data = part.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        strictly(EVENTS[event["type"]], event)
        found.append(event)
    numbers = [event["sequence_number"] for event in found]
    assert numbers == list(range(first, first + len(found)))
    return found


def judged(response: dict[str, Any]) -> dict[str, Any]:
    strictly(Response, response)
    return response


def strictly(model: type[BaseModel], value: dict[str, Any]) -> None:
    """The value has all fields of the model, right types, and no other field."""
    parsed = model.model_validate(value, strict=True)
    extra = list(_extra(parsed, model.__name__))
    assert not extra, extra


def _extra(value: Any, path: str):
    if isinstance(value, BaseModel):
        for name in value.model_extra or ():
            yield f"{path}.{name}"
        for name in value.model_fields_set:
            yield from _extra(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _extra(item, f"{path}.{i}")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events without their common prefix; deltas that follow each other count once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [
        name
        for i, name in enumerate(names)
        if not (i and name.endswith(".delta") and names[i - 1] == name)
    ]
