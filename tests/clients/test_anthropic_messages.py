"""The official Anthropic client on the messages API: its typed models accept every answer, event and error."""

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import Message
from pydantic import BaseModel

from tests.clients.conftest import HELLO, HELLO_ANSWER, MODEL
from tests.clients.test_openai_tools import LOOK_UP

TOOL = {"name": "look_up", "description": "Look a name up.", "input_schema": LOOK_UP}
NAMED = {"type": "tool", "name": "look_up"}


class Weather(BaseModel):
    """The client sends neither lengths nor bounds, only which values there are."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def claude(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def asked(**fields) -> dict:
    """Arguments of a message, greedy unless the fields say otherwise."""
    return {
        "model": MODEL,
        "max_tokens": 200,
        "messages": HELLO,
        "extra_body": {"temperature": 0},
    } | fields


def test_an_answer(claude, chat):
    message = claude.messages.create(**asked(system="Be short."))
    same = chat([{"role": "system", "content": "Be short."}, *HELLO], max_tokens=200)
    assert message.id.startswith("msg_") and message.model == MODEL
    assert [block.text for block in message.content] == [same.choices[0].message.content]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.output_tokens == same.usage.completion_tokens
    cached = usage.cache_read_input_tokens
    assert usage.input_tokens + cached == same.usage.prompt_tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_answers_equal_those_of_chat(claude, chat, seed):
    fields = {"temperature": 1.2, "top_p": 0.9, "seed": seed}
    body = asked(max_tokens=30, extra_body=fields)
    message = claude.messages.create(**body)
    same = chat(HELLO, **fields, max_tokens=30)
    assert message.content[0].text == same.choices[0].message.content
    with claude.messages.stream(**body) as stream:
        assert stream.get_final_text() == message.content[0].text


def test_every_event_of_a_stream(claude):
    with claude.messages.stream(**asked()) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type not in ("ping", "text")]
    deltas = kinds.count("content_block_delta")
    assert deltas > 5
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(event.text for event in events if event.type == "text") == final.content[0].text
    whole = claude.messages.create(**asked())
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_raw_stream(claude):
    """Without the helper that puts the message together."""
    with claude.messages.create(**asked(stream=True)) as stream:
        texts = [event.delta.text for event in stream if event.type == "content_block_delta"]
    assert "".join(texts).startswith(HELLO_ANSWER)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["small"]}, "stop_sequence", "small"),
    ],
)
def test_stop_reasons(claude, fields, reason, sequence):
    message = claude.messages.create(**asked(**fields))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert HELLO_ANSWER.startswith(message.content[0].text.rstrip())


def test_blocks_and_an_answer_that_is_begun(claude):
    blocks = [
        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
    ]
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    in_blocks = asked(system=system, messages=[{"role": "user", "content": blocks}])
    message = claude.messages.create(**in_blocks)
    assert message.content == claude.messages.create(**asked(system="Be short.")).content
    begun = [*HELLO, {"role": "assistant", "content": "Hello! I am a"}]
    assert claude.messages.create(**asked(messages=begun)).content[0].text.startswith(" small")


@pytest.mark.parametrize("choice", [NAMED, {"type": "any"}])
def test_a_tool_and_its_result(claude, choice):
    question = {"role": "user", "content": "What is a dict?"}
    body = asked(messages=[question], tools=[TOOL])
    first = claude.messages.create(**body, tool_choice=choice)
    assert first.stop_reason == "tool_use"
    call = next(block for block in first.content if block.type == "tool_use")
    assert call.id.startswith("toolu_") and call.name == "look_up"
    assert set(call.input) == {"name", "deep"} and call.input["name"] in ("dict", "list")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It maps keys to values."}
    turn = {"role": "assistant", "content": first.content}
    body["messages"] = [question, turn, {"role": "user", "content": [result]}]
    second = claude.messages.create(**body)
    assert second.content
    assert number_of_input_tokens(second) > number_of_input_tokens(first) + 20


def number_of_input_tokens(message: Message) -> int:
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_streamed_tool_equals_the_whole_one(claude, chat):
    single = {**NAMED, "disable_parallel_tool_use": True}
    body = asked(tools=[TOOL], tool_choice=single)
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert [block.input for block in final.content] == [block.input for block in whole.content]
    assert json.loads("".join(parts)) == final.content[-1].input
    assert final.stop_reason == "tool_use"
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": LOOK_UP}
    named = {"type": "function", "function": {"name": "look_up"}}
    same = chat(
        tools=[{"type": "function", "function": function}],
        tool_choice=named,
        parallel_tool_calls=False,
        max_tokens=200,
    )
    (call,) = same.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == final.content[-1].input


def test_the_tool_runner(claude):
    """The helper calls the function and sends the whole conversation with its result."""
    seen = []

    @beta_tool(input_schema=LOOK_UP)
    def look_up(name: str, deep: bool) -> str:
        """Look a name up."""
        seen.append((name, deep))
        return "It maps keys to values."

    runner = claude.beta.messages.tool_runner(
        **asked(tools=[look_up], tool_choice=NAMED), max_iterations=2
    )
    messages = list(runner)
    assert len(messages) == 2 and len(seen) >= 1
    counts = [number_of_input_tokens(message) for message in messages]
    assert counts[1] > counts[0] + 20


def test_a_form(claude):
    message = claude.messages.parse(**asked(output_format=Weather))
    assert isinstance(message.parsed_output, Weather)
    with claude.messages.stream(**asked(output_format=Weather)) as stream:
        assert stream.get_final_message().parsed_output == message.parsed_output


def test_count_tokens(claude):
    body = {"model": MODEL, "messages": HELLO, "system": "Be short.", "tools": [TOOL]}
    count = claude.messages.count_tokens(**body).input_tokens
    message = claude.messages.create(**asked(**body, max_tokens=1))
    assert count == number_of_input_tokens(message)
    assert claude.beta.messages.count_tokens(**body).input_tokens == count


def test_thinking_of_a_model_that_does_not_think(claude):
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        message = claude.messages.create(**asked(thinking=thinking))
        assert [block.type for block in message.content] == ["text"]


def test_models(claude):
    assert [model.id for model in claude.models.list()] == [MODEL]
    assert claude.models.retrieve(MODEL).id == MODEL


def test_many_at_once(server):
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused") as client:
            answers = (client.messages.create(**asked(max_tokens=20)) for _ in range(12))
            return [answer.content[0].text for answer in await asyncio.gather(*answers)]

    assert len(set(asyncio.run(main()))) == 1


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "other"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        (
            {"messages": [{"role": "x", "content": "a"}]},
            anthropic.BadRequestError,
            "messages.0.role",
        ),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "temperature"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "tools.0.type",
        ),
        (
            {"messages": [{"role": "user", "content": "x " * 3000}]},
            anthropic.BadRequestError,
            "prompt is too long",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(claude, fields, error, words, stream):
    with pytest.raises(error, match=words) as info:
        claude.messages.create(**asked(**fields), stream=stream)
    body = info.value.body
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert info.value.request_id == body["request_id"]


def test_leaving_a_stream_frees_its_request(claude, server):
    endless = asked(max_tokens=1500, extra_body={"ignore_eos": True, "temperature": 0.5})
    with claude.messages.stream(**endless) as stream:
        for i, _event in enumerate(stream):
            if i == 8:
                break
    server.wait_free()
