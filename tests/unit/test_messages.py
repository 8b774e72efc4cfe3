"""POST /v1/messages: the prompt and the answer equal those of chat completions, in Anthropic's shapes."""

import json
from typing import Any

import httpx
import pytest

from cluster.api.messages.conversation import chat_messages
from cluster.api.messages.fields import CountTokensRequest
from cluster.api.messages.routes import draft_message
from cluster.api.messages.translate import chat_request
from cluster.api.request.draft import Drafter, EngineFacts
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, says, tiny_tokenizer
from tests.unit.test_tool_parsers import CALL, NOW, OTHER, ROME, tag

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME = {"name": "time.now", "input_schema": {"type": "object"}}


def api_that_says(text: str | bytes, **settings: Any) -> Api:
    return Api(FakeBackend(says(text, end=[IM_END])), **settings)


def ask(api: Api, content: Any = "hi", **fields: Any) -> httpx.Response:
    """Post a message of one user turn, with room for the whole script."""
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": content}], **fields}
    return api.post("/v1/messages", body)


def answer(api: Api, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    response = ask(api, content, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def prompts(api: Api) -> list[str]:
    return [bytes(i for i in ids if i < 256).decode() for ids, _ in api.backend.requests.values()]


def test_an_answer_has_every_field():
    api = api_that_says("Hello.")
    response = ask(api, model=MODEL)
    message = response.json()
    assert message.pop("id").startswith("msg_")
    num_input = len(next(iter(api.backend.requests.values()))[0])
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_input,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "request-id" not in api.get("/v1/models").headers


def test_an_empty_answer_has_one_empty_block():
    assert answer(api_that_says(""))["content"] == [{"type": "text", "text": ""}]
    assert answer(api_that_says(""), tools=[WEATHER])["content"] == [{"type": "text", "text": ""}]


def test_cached_tokens_are_counted_apart():
    usage = answer(Api(FakeBackend(says("x", end=[IM_END]), num_cached_tokens=16)))["usage"]
    assert usage["cache_read_input_tokens"] == 16
    whole = answer(api_that_says("x"))["usage"]["input_tokens"]
    assert usage["input_tokens"] == whole - 16


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 5}, "max_tokens", None),
        ({"stop_sequences": ["wor"]}, "stop_sequence", "wor"),
        ({}, "end_turn", None),
    ],
)
def test_stop_reasons(fields: dict[str, Any], reason: str, sequence: str | None):
    message = answer(api_that_says("hello world"), **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_max_tokens_beyond_the_context_is_cut():
    message = answer(Api(FakeBackend("ab", max_model_len=60)), max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == 60


CONVERSATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"messages": [{"role": "user", "content": "a"}], "system": "Be brief."},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "a"},
            ]
        },
    ),
    (
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=f00;"},
                {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Two."},
            ],
        },
        {
            "messages": [
                {"role": "system", "content": "One.\nTwo."},
                {"role": "user", "content": "a"},
            ]
        },
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
                {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
                {"role": "system", "content": "e"},
                {"role": "user", "content": "f"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c\nd"},
                {"role": "system", "content": "e"},
                {"role": "user", "content": "f"},
            ]
        },
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "redacted_thinking", "data": "AAAA"},
                        {"type": "text", "text": "Let me look."},
                        {"type": "tool_use", "id": "t1", "name": "x", "input": {"k": 1}},
                        {"type": "tool_use", "id": "t2", "name": "y", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "content": [{"type": "text", "text": "two"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "go on"},
                    ],
                },
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "Let me look.",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "t1", "function": {"name": "x", "arguments": '{"k": 1}'}},
                        {"id": "t2", "function": {"name": "y", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "one"},
                {"role": "tool", "tool_call_id": "t2", "content": "Error: two"},
                {"role": "user", "content": "go on"},
            ]
        },
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "The answer is"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "The answer is"},
            ],
            "continue_final_message": True,
        },
    ),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": []}]},
        {"messages": [{"role": "user", "content": "a"}]},
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}],
                },
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "\nb"},
            ],
            "continue_final_message": True,
        },
    ),
    (
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [WEATHER, {**TIME, "type": "custom", "cache_control": None}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
        },
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "parameters": tool["input_schema"],
                        **({"description": tool["description"]} if "description" in tool else {}),
                    },
                }
                for tool in (WEATHER, TIME)
            ],
            "enable_thinking": True,
            "reasoning_effort": "low",
        },
    ),
]


@pytest.mark.parametrize(("body", "chat"), CONVERSATIONS)
def test_prompt_and_sampling_equal_those_of_chat_completions(
    body: dict[str, Any], chat: dict[str, Any]
):
    api = api_that_says("x")
    same = {"seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 9}
    assert api.post("/v1/chat/completions", {**chat, **same}).status_code == 200
    assert api.post("/v1/messages", {**body, **same}).status_code == 200
    first, second = api.backend.requests.values()
    assert first == second
    count = api.post("/v1/messages/count_tokens", body)
    assert count.json() == {"input_tokens": len(first[0])}


def test_the_parts_of_a_conversation_reach_the_prompt():
    api = api_that_says("x")
    assert api.post("/v1/messages", {**CONVERSATIONS[3][0], "max_tokens": 9}).status_code == 200
    (prompt,) = prompts(api)
    for text in ("Let me look.", "one", "Error: two", "go on"):
        assert text in prompt


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_final_message_of_the_assistant_is_left_out(content: Any):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    chat = chat_request(CountTokensRequest(messages=turns))
    assert [message["role"] for message in chat.messages] == ["user"]
    assert not chat.continue_final_message


def test_thoughts_of_joined_messages_are_joined():
    def turn(*thoughts: str) -> dict[str, Any]:
        blocks = [{"type": "thinking", "thinking": text, "signature": ""} for text in thoughts]
        return {"role": "assistant", "content": blocks}

    def thoughts(*turns: dict[str, Any]) -> str | None:
        (message,) = chat_messages(None, list(turns))
        return message.get("reasoning_content")

    assert thoughts(turn("one"), turn("two")) == "one\ntwo"
    assert thoughts(turn(), turn("two")) == "two"
    assert thoughts(turn("one"), turn()) == "one"


def test_tool_use_blocks_stand_after_the_text():
    message = answer(api_that_says(f"Sure.\n{tag(CALL)}\n{tag(OTHER)}"), tools=[WEATHER, TIME])
    assert message["stop_reason"] == "tool_use"
    text, *calls = message["content"]
    assert text == {"type": "text", "text": "Sure."}
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == 2 and all(id_.startswith("toolu_") for id_ in ids)
    assert calls == [
        {"type": "tool_use", "name": name, "input": json.loads(arguments)}
        for name, arguments in (ROME, NOW)
    ]


def test_a_call_cut_by_max_tokens_has_an_empty_input():
    message = answer(api_that_says(tag(CALL)), tools=[WEATHER], max_tokens=60)
    assert message["stop_reason"] == "max_tokens"
    (call,) = message["content"]
    assert (call["type"], call["input"]) == ("tool_use", {})


@pytest.mark.parametrize(
    ("choice", "has_grammar", "parallel"),
    [
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "get_weather"}, True, False),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
    ],
)
def test_tool_choice(choice: dict[str, Any], has_grammar: bool, parallel: bool):
    api = api_that_says(f"{tag(CALL)}\n{tag(CALL)}")
    message = answer(api, tools=[WEATHER, TIME], tool_choice=choice)
    ((_, params),) = api.backend.requests.values()
    assert (params.grammar is not None) == has_grammar
    assert len(message["content"]) == (2 if parallel else 1)
    assert message["stop_reason"] == "tool_use"


def test_tool_choice_none_gives_text():
    message = answer(api_that_says(tag(CALL)), tools=[WEATHER], tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": tag(CALL)}]


def test_thinking_comes_as_a_block_of_its_own():
    text = "<think>\nhm, well\n</think>\n\nYes."
    api = api_that_says(text, reasoning_parser="think")
    message = answer(api)
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm, well", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == len(text) - 6
    for thinking in ({"type": "adaptive", "display": "omitted"}, {"type": "disabled"}):
        assert answer(api, thinking=thinking)["content"] == [{"type": "text", "text": "Yes."}]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_an_output_format_is_a_grammar(fields: dict[str, Any]):
    api = api_that_says('{"a": 1}')
    answer(api, **fields)
    chat = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert api.chat(response_format=chat).status_code == 200
    first, second = (params.grammar for _, params in api.backend.requests.values())
    assert first is not None and first == second


def test_what_other_clients_send_beside_is_ignored():
    api = api_that_says("x")
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04"}
    body = {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "mcp_servers": [],
        "container": None,
    }
    path = "/v1/messages?beta=true"
    assert api.request("POST", path, json=body, headers=headers).status_code == 200


def test_a_missing_field_is_named_without_the_object_around_it():
    with pytest.raises(BadRequestError) as caught:
        body = {"messages": [{"role": "user", "content": "x"}]}
        draft_message(Drafter(tiny_tokenizer(), ApiSettings()), body, EngineFacts("m", 9, 9))
    assert str(caught.value) == "max_tokens: Field required"
