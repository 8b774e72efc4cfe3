"""Structured output and required tool calls over a real server, many at once beside plain requests."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["small", "large"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"k": {"enum": ["a", "b"]}},
    "required": ["k"],
    "additionalProperties": False,
}
TOOLS = [  # few: the model takes 512 tokens, and they are bytes
    {"type": "function", "function": {"name": "buy", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "sell"}},
]


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)


def structured(client, seed: int) -> None:
    described = {"name": "thing", "schema": SCHEMA, "strict": True}
    choice = client.chat.completions.create(
        messages=USER,
        seed=seed,
        response_format={"type": "json_schema", "json_schema": described},
        model="tiny",
    ).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def required_call(client, seed: int) -> None:
    fields = {"seed": seed, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(messages=USER, **fields, model="tiny").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    schema = ARGUMENTS if call.function.name == "buy" else {"maxProperties": 0}
    jsonschema.validate(json.loads(call.function.arguments), schema)


def streamed_call(client, seed: int) -> None:
    named = {"type": "function", "function": {"name": "sell"}}
    fields = {"seed": seed, "tools": TOOLS, "tool_choice": named, "stream": True}
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(messages=USER, **fields, model="tiny"):
        choice = chunk.choices[0]
        for part in choice.delta.tool_calls or []:
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        reason = choice.finish_reason or reason
    assert (name, reason) == ("sell", "stop")
    assert json.loads(arguments) == {}


def chosen(client, seed: int) -> None:
    words = ["yes", "no", "perhaps"]
    answer = client.completions.create(
        prompt="?", seed=seed, max_tokens=20, extra_body={"guided_choice": words}, model="tiny"
    )
    assert answer.choices[0].text in words and answer.choices[0].finish_reason == "stop"


def broken(client, seed: int) -> None:
    # Only a rank knows which special tokens there are.
    with pytest.raises(openai.BadRequestError, match="the grammar"):
        client.completions.create(
            prompt="?",
            seed=seed,
            max_tokens=20,
            extra_body={"guided_grammar": "start: <nope>"},
            model="tiny",
        )


def plain(client, _seed: int) -> str:
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def test_all_kinds_at_once(client):
    alone = plain(client, 0)
    kinds = [structured, required_call, streamed_call, chosen, broken, plain]
    with ThreadPoolExecutor(24) as pool:
        results = [pool.submit(kinds[i % len(kinds)], client, i) for i in range(48)]
        found = [result.result() for result in results]
    assert {text for text in found if text is not None} == {alone}
