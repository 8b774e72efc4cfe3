"""The official Python client on the responses API: its typed models accept every answer and event."""

import json
from collections.abc import Callable
from typing import Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, Field

from tests.clients.conftest import HELLO, HELLO_ANSWER, MODEL
from tests.clients.test_openai_tools import LOOK_UP

TOOL = {"type": "function", "name": "look_up", "description": "Find it.", "parameters": LOOK_UP}
NAMED = {"type": "function", "name": "look_up"}
MANY = {"max_output_tokens": 200}
ENDLESS = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}, "temperature": 0.5}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


@pytest.fixture
def respond(client) -> Callable[..., Response]:
    """respond(input, **fields), greedy unless the fields say otherwise."""

    def call(asked="Hello", **fields) -> Response:
        return client.responses.create(**body(asked, **fields))

    return call


def body(asked="Hello", **fields) -> dict:
    """Arguments of a response."""
    return {"model": MODEL, "input": asked, "temperature": 0, **fields}


def test_an_answer(respond, chat):
    response = respond(instructions="Be short.", metadata={"a": "b"}, **MANY)
    same = chat([{"role": "system", "content": "Be short."}, *HELLO], max_tokens=200)
    assert response.output_text == same.choices[0].message.content
    assert response.id.startswith("resp_") and response.status == "completed"
    assert [item.type for item in response.output] == ["message"]
    assert response.model == MODEL and response.metadata == {"a": "b"}
    usage = response.usage
    assert usage.input_tokens == same.usage.prompt_tokens
    assert usage.output_tokens == same.usage.completion_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_answers_equal_those_of_chat(respond, client, chat, seed):
    fields = {"temperature": 1.2, "top_p": 0.9}
    extra = {"extra_body": {"seed": seed}}
    response = respond(**fields, **extra, max_output_tokens=30)
    same = chat(HELLO, **fields, seed=seed, max_tokens=30)
    assert response.output_text == same.choices[0].message.content
    streamed = respond(**fields, **extra, max_output_tokens=30, stream=True)
    assert list(streamed)[-1].response.output_text == response.output_text


def test_every_event_of_a_stream(client, respond):
    with client.responses.create(**body(**MANY), stream=True) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * len(deltas),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert "".join(deltas) == final.output_text == respond(**MANY).output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert len(deltas) > 5 and final.usage.output_tokens > 5


def test_the_streaming_helper(client):
    with client.responses.stream(**body(**MANY)) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert final.output_text == text and text.startswith(HELLO_ANSWER)


def test_a_limit_makes_it_incomplete(client, respond):
    response = respond(max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    with client.responses.create(**body(max_output_tokens=3), stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == response.output_text


def test_a_conversation_in_items(respond, chat):
    first = respond(**MANY)
    question = {"role": "user", "content": [{"type": "input_text", "text": "What is a dict?"}]}
    turn = {"role": "assistant", "content": first.output_text}
    for answer in (first.output, [turn]):
        second = respond([*HELLO, *answer, question], max_output_tokens=20)
        same = chat([*HELLO, turn, {"role": "user", "content": "What is a dict?"}], max_tokens=20)
        assert second.output_text == same.choices[0].message.content
        assert second.usage.input_tokens == same.usage.prompt_tokens


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_tool_and_its_output(respond, choice):
    question = {"role": "user", "content": "What is a dict?"}
    first = respond([question], tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **MANY)
    (call,) = (item for item in first.output if item.type == "function_call")
    arguments = json.loads(call.arguments)
    assert call.name == "look_up" and call.status == "completed"
    assert arguments["name"] in ("dict", "list") and isinstance(arguments["deep"], bool)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It maps keys."}
    second = respond([question, *first.output, output], tools=[TOOL], **MANY)
    assert second.output
    assert second.usage.input_tokens > first.usage.input_tokens + 20


def test_a_streamed_tool_equals_the_whole_one(client, respond):
    fields = {"tools": [TOOL], "tool_choice": NAMED, "parallel_tool_calls": False, **MANY}
    whole = next(item for item in respond(**fields).output if item.type == "function_call")
    with client.responses.stream(**body(**fields)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
    call = next(item for item in final.output if item.type == "function_call")
    assert "".join(parts) == done.arguments == call.arguments == whole.arguments


def test_the_clients_own_forms(client):
    parsed = client.responses.parse(**body(text_format=Weather, **MANY))
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**body(text_format=Weather, **MANY)) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    tool = openai.pydantic_function_tool(Weather)
    named = {"type": "function", "name": "Weather"}
    called = client.responses.parse(**body(tools=[tool], tool_choice=named, **MANY))
    call = next(item for item in called.output if item.type == "function_call")
    assert isinstance(call.parsed_arguments, Weather)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "name": "a", "schema": LOOK_UP, "strict": True},
        {"type": "json_object"},
    ],
)
def test_forms(respond, form):
    response = respond(text={"format": form}, **MANY)
    value = json.loads(response.output_text)
    assert isinstance(value, dict) and (form["type"] == "json_object" or value["name"])


def test_logprobs(respond):
    response = respond(include=["message.output_text.logprobs"], top_logprobs=2, **MANY)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(item.token for item in logprobs).startswith(response.output_text)
    assert all(len(item.top_logprobs) == 2 for item in logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"input": [{"role": "x", "content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, None),
        ({"input": []}, "input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields_are_named(client, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(**body() | fields, stream=stream)
    assert param is None or info.value.param == param
    assert info.value.code and info.value.body["message"]


def test_no_such_model(respond):
    with pytest.raises(openai.NotFoundError) as info:
        respond(model="other")
    assert info.value.code == "model_not_found"


def test_too_long_an_input(respond):
    with pytest.raises(openai.BadRequestError) as info:
        respond("x " * 3000)
    assert info.value.code == "context_length_exceeded"
    assert respond("x " * 3000, truncation="auto", max_output_tokens=2).output_text is not None


def test_leaving_a_stream_frees_its_request(client, server):
    with client.responses.create(**body(**ENDLESS), stream=True) as stream:
        for i, _event in enumerate(stream):
            if i == 8:
                break
    server.wait_free()
