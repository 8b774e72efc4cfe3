"""The official client's own helpers for structured output, tools and reasoning understand the answers."""

from typing import Literal

import openai
import pydantic
import pytest

from scripts.byte_tokenizer import CHAT_TEMPLATE
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, says, tiny_tokenizer
from tests.unit.test_api_openai import USER, with_client
from tests.unit.test_tool_parsers import CALL, OTHER, TOOLS, tag


class City(pydantic.BaseModel):
    """What is asked for."""

    name: str
    size: Literal["small", "large"]


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


def api_that_says(text):
    return Api(FakeBackend(says(text, size=3, end=[IM_END])))


def test_parse_gives_an_instance():
    async def call(client):
        return await client.chat.completions.parse(model=MODEL, messages=USER, response_format=City)

    api = api_that_says('{"name": "Rome", "size": "large"}')
    message = with_client(api, call).choices[0].message
    assert message.parsed == City(name="Rome", size="large")
    ((_ids, params),) = api.backend.requests.values()
    assert params.grammar


def test_parse_gives_the_arguments_of_a_tool():
    tool = openai.pydantic_function_tool(GetWeather)

    async def call(client):
        return await client.chat.completions.parse(
            model=MODEL, messages=USER, tools=[tool], tool_choice="required"
        )

    api = api_that_says(tag('{"name": "GetWeather", "arguments": {"city": "Rome"}}'))
    choice = with_client(api, call).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == GetWeather(city="Rome")


def test_the_stream_helper_puts_calls_together():
    async def call(client):
        async with client.chat.completions.stream(
            model=MODEL, messages=USER, tools=TOOLS
        ) as stream:
            events = [event.type async for event in stream]
            return events, await stream.get_final_completion()

    events, answer = with_client(api_that_says(f"Hm.\n{tag(CALL)}\n{tag(OTHER)}"), call)
    message = answer.choices[0].message
    assert message.content == "Hm."
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("get_weather", '{"city": "Rome"}'), ("time.now", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.choices[0].finish_reason == "tool_calls"
    assert events.count("tool_calls.function.arguments.done") == 2


def test_a_conversation_with_calls_comes_back_as_it_was():
    async def call(client):
        first = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
        message = first.choices[0].message
        tool_call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": "25 C"}
        return await client.chat.completions.create(
            model=MODEL, messages=[*USER, message, result], tools=TOOLS
        )

    api = api_that_says(tag(CALL))
    with_client(api, call)
    _first, (ids, _params) = api.backend.requests.values()
    assert tag(CALL) in tiny_tokenizer().decode(ids)


def test_a_broken_schema_is_a_bad_request_of_the_client():
    schema = {"type": "object", "properties": {"a": {"type": "strin"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def call(client):
        return await client.chat.completions.create(
            model=MODEL, messages=USER, response_format=response_format
        )

    with pytest.raises(openai.BadRequestError) as caught:
        with_client(api_that_says(""), call)
    assert caught.value.param == "response_format.json_schema.schema.properties.a"


def test_reasoning_stands_beside_the_content(monkeypatch):
    template = CHAT_TEMPLATE + "{# </think> #}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)

    async def call(client):
        plain = await client.chat.completions.create(model=MODEL, messages=USER)
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        return plain.choices[0].message, deltas

    message, deltas = with_client(api_that_says("<think>\nHm.\n</think>\n\nYes."), call)
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
