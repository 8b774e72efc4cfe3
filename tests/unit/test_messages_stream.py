"""Streams of /v1/messages: the order of events, and the same content as the whole answer."""

import json
from typing import Any

import pytest

from cluster.errors import EngineDeadError
from tests.unit.api_fakes import IM_END, Api, FakeBackend, says
from tests.unit.test_messages import TIME, WEATHER, answer, api_that_says, ask
from tests.unit.test_tool_parsers import CALL, OTHER, ROME, tag

DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
    "signature_delta": "signature",
}


def stream(api: Api, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; checks the framing and that each event has the name of its type."""
    response = ask(api, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *items, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for item in items:
        name, data = item.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events; checks their order."""
    first, ping, *items, delta, last = events
    assert (first["type"], ping) == ("message_start", {"type": "ping"})
    assert (delta["type"], last) == ("message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open, inputs = False, ""
    for item in items:
        assert item["index"] == len(message["content"]) - is_open
        if item["type"] == "content_block_start":
            assert not is_open
            is_open, inputs = True, ""
            message["content"].append(item["content_block"])
            continue
        block = message["content"][-1]
        if item["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use" and inputs:
                block["input"] = json.loads(inputs)
            continue
        assert is_open and item["type"] == "content_block_delta"
        kind = item["delta"]["type"]
        piece = item["delta"][DELTAS[kind]]
        assert set(item["delta"]) == {"type", DELTAS[kind]}
        if kind == "input_json_delta":
            inputs += piece
        else:
            block[DELTAS[kind]] += piece
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


@pytest.mark.parametrize(
    ("text", "fields", "settings"),
    [
        ("Hello, w\u00f6rld \U0001f600 \u2028!", {}, {}),
        ("", {}, {}),
        ("", {"tools": [WEATHER]}, {}),
        ("hello world", {"stop_sequences": ["wor"]}, {}),
        ("hello world", {"max_tokens": 1}, {}),
        ("hello world", {"tools": [WEATHER]}, {}),
        (f"Sure.\n{tag(CALL)}\n{tag(OTHER)}", {"tools": [WEATHER, TIME]}, {}),
        (f"{tag(CALL)} and {tag(OTHER)} end", {"tools": [WEATHER, TIME]}, {}),
        ("<think>\nhm, well\n</think>\n\nYes.", {}, {"reasoning_parser": "think"}),
        ("<think>hm", {}, {"reasoning_parser": "think"}),
        (
            f"<think>hm</think>Sure. {tag(CALL)}",
            {"tools": [WEATHER]},
            {"reasoning_parser": "think"},
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_joins_to_the_whole_answer(
    text: str, fields: dict[str, Any], settings: dict[str, Any], size: int
):
    api = Api(FakeBackend(says(text, size=size, end=[IM_END])), **settings)
    messages = [joined(stream(api, **fields)), answer(api, **fields)]
    for message in messages:
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert messages[0] == messages[1]


def test_the_first_event_has_the_usage_of_the_prompt():
    api = Api(FakeBackend(says("x", end=[IM_END]), num_cached_tokens=16))
    first, *_, delta, _ = stream(api)
    whole = answer(api_that_says("x"))["usage"]["input_tokens"]
    assert first["message"]["usage"] == {
        "input_tokens": whole - 16,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert delta["usage"]["output_tokens"] == 2


def test_tokens_are_streamed_one_by_one():
    deltas = [
        e["delta"]["text"] for e in stream(api_that_says("hello")) if "index" in e and "delta" in e
    ]
    assert deltas == [*"hello"]


def test_a_call_cut_by_max_tokens_leaves_its_json_unfinished():
    events = stream(api_that_says(tag(CALL)), tools=[WEATHER], max_tokens=60)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    begun = "".join(delta["partial_json"] for delta in deltas)
    assert begun and ROME[1].startswith(begun) and begun != ROME[1]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_an_error_in_a_stream_is_an_event():
    backend = FakeBackend("abc")
    backend.fail_after = (3, EngineDeadError("rank 1 died"))
    events = stream(Api(backend))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "rank 1 died"}
    assert [e["type"] for e in events[:3]] == ["message_start", "ping", "content_block_start"]


def test_an_error_before_the_first_token_has_its_status():
    backend = FakeBackend("abc")
    backend.fail_before = EngineDeadError("no rank")
    assert ask(Api(backend), stream=True).status_code == 503
