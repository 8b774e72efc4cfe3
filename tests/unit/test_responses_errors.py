"""POST /v1/responses: each wrong field is a 400 that names the field of this route."""

import pytest

from tests.unit.api_fakes import Api, assert_error
from tests.unit.responses_case import TIME, WEATHER, respond

BAD_SCHEMA = {"type": "objec"}
USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def text_format(**fields):
    return {"text": {"format": {"type": "json_schema", **fields}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ""}, None),
        ({"input": "\ud800"}, "input"),
        ({"input": ["a"]}, "input.0"),
        ({"input": [{}]}, "input.0.type"),
        ({"input": [{"type": 5}]}, "input.0.type"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input.1.type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": [], "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input.0.content.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text",
        ),
        ({"input": [{"role": "user", "content": "a\udc00"}]}, "input.0.content"),
        ({"input": [{**USER, "id": 5}]}, "input.0.id"),
        ({"input": [{**CALL, "call_id": None}]}, "input.0.call_id"),
        ({"input": [{**CALL, "name": 5}]}, "input.0.name"),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input.0.content"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input.0.summary.0"),
        ({"instructions": 5}, "instructions"),
        ({"model": "other"}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_output_tokens": 3, "min_tokens": 5}, "min_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": "a"}, "top_p"),
        ({"stop": 5}, "stop"),
        ({"include": ["x"]}, "include.0"),
        ({"include": "x"}, "include"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "grammar", "grammar": "x"}}}, "text.format.type"),
        ({"text": {"format": 5}}, "text.format"),
        (text_format(schema={}), "text.format.name"),
        (text_format(name="a"), "text.format.schema"),
        (text_format(name="a", schema=5), "text.format.schema"),
        (text_format(name="a", schema=BAD_SCHEMA), "text.format.schema"),
        ({"tools": {}}, "tools"),
        ({"tools": ["a"]}, "tools.0"),
        ({"tools": [{"name": "f"}]}, "tools.0.type"),
        ({"tools": [TIME, {"type": "web_search"}]}, "tools.1.type"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{**TIME, "parameters": []}]}, "tools.0.parameters"),
        ({"tools": [{**TIME, "description": 5}]}, "tools.0.description"),
        ({"tools": [{**TIME, "strict": "yes"}]}, "tools.0.strict"),
        ({"tools": [TIME, TIME]}, "tools.1.name"),
        (
            {"tools": [WEATHER, {**TIME, "parameters": BAD_SCHEMA}], "tool_choice": "required"},
            "tools.1.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TIME], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (
            {
                "tools": [TIME],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice.tools.0.name",
        ),
        (
            {
                "tools": [TIME],
                "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [TIME]},
            },
            "tool_choice.mode",
        ),
        ({"truncation": "some"}, "truncation"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"messages": [USER]}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_field_is_named(fields, param):
    api = Api()
    if param is None:
        assert respond(api, **fields).status_code == 200
        return
    body = {"input": "hi", **fields}
    response = api.post("/v1/responses", body)
    error = assert_error(response, 404 if param == "model" else 400)
    assert error["param"] == param, error
    assert not api.backend.requests


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"input": [{"type": "web_search_call"}]}, "'web_search_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'"),
        ({"max_tokens": 5}, "use max_output_tokens"),
        ({"max_output_tokens": 10**6}, "lower max_output_tokens"),
        (text_format(name="a"), "text.format.schema is missing"),
        ({"tools": [{"type": "function"}]}, "tools.0.name must be"),
    ],
)
def test_messages_name_what_is_wrong(fields, words):
    assert words in assert_error(respond(Api(), **fields), 400)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"service_tier": "auto", "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 3},
        {"conversation": None, "prompt": None, "truncation": None, "n": 1, "unknown": 5},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"cache_salt": "a", "priority": 1, "ignore_eos": True, "max_output_tokens": 5},
    ],
)
def test_fields_that_clients_send(fields):
    assert respond(Api(), **fields).status_code == 200
