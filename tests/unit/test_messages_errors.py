"""Errors of /v1/messages: Anthropic's envelope with the right type, and a message that names the field."""

import re
from typing import Any

import httpx
import pytest

from cluster.api.answer.message_parser import CallPart, ToolCall
from cluster.api.messages.writer import _content
from cluster.config.api_keys import KeyDigests, digest
from cluster.errors import EngineDeadError, OverloadedError
from tests.unit.api_fakes import MODEL, Api, FakeBackend, assert_error

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def assert_message_error(response: httpx.Response, status: int, kind: str) -> str:
    """The envelope, complete; returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) - {"details"} == {"type", "message"}
    assert body["error"]["type"] == kind, body
    assert body["request_id"] == response.headers["request-id"]
    message = body["error"]["message"]
    assert isinstance(message, str) and message
    return message


def refused(fields: dict[str, Any], path: str = "/v1/messages", **api: Any) -> str:
    response = Api(**api).post(path, {"max_tokens": 9, "messages": HI, **fields})
    return assert_message_error(response, 400, "invalid_request_error")


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *blocks]}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": [*blocks]}, *HI]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages.0 "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        (user("x"), "messages.0.content.1 "),
        (user({"text": "x"}), "messages.0.content.1 "),
        (user({"type": "text"}), "messages.0.content.1.text"),
        (user({"type": "image", "source": {}}), "messages.0.content.1.source"),
        (user({"type": "document", "source": {}}), "messages.0.content.1.type"),
        (user({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "'tool_use'"),
        (user({"type": "tool_result", "content": "x"}), "messages.0.content.1.tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": 3}),
            "messages.0.content.1.content ",
        ),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "messages.0.content.1.content.0.source",
        ),
        (assistant({"type": "thinking"}), "messages.1.content.0.thinking"),
        (assistant({"type": "server_tool_use"}), "messages.1.content.0.type"),
        (assistant({"type": "tool_use", "id": "a", "name": 3}), "messages.1.content.0.name"),
        (assistant({"type": "tool_use", "name": "a"}), "messages.1.content.0.id"),
        (
            assistant({"type": "tool_use", "id": "a", "name": "b", "input": "{}"}),
            "messages.1.content.0.input",
        ),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    },
                ]
            },
            "tool_result",
        ),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools.0"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [{**TOOL, "description": 3}]}, "tools.0.description"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        (
            {
                "tools": [{**TOOL, "input_schema": {"type": "object", "properties": {"a": 3}}}],
                "tool_choice": {"type": "any"},
            },
            "tools.0.input_schema",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"effort": "none at all"}}, "output_config.effort"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str):
    message = refused(fields)
    assert named in message
    assert "function" not in message and "response_format" not in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"messages": 3}, "messages"), ({"tools": [3]}, "tools.0"), ({"system": 3}, "system")],
)
def test_count_tokens_names_the_field_too(fields: dict[str, Any], named: str):
    assert named in refused(fields, "/v1/messages/count_tokens")


def test_a_prompt_beyond_the_context_is_called_too_long():
    message = refused(
        {"messages": [{"role": "user", "content": "x" * 100}]},
        backend=FakeBackend(max_model_len=60),
    )
    found = re.match(r"prompt is too long: (\d+) tokens > 59 maximum; ", message)
    assert found is not None and int(found[1]) > 100
    limited = refused({}, max_prompt_tokens=3)
    assert re.match(r"prompt is too long: \d+ tokens > 3 maximum; ", limited)


def test_each_status_has_its_type():
    api = Api()
    body = {"max_tokens": 9, "messages": HI}
    missing = api.post("/v1/messages", {**body, "model": "claude-x"})
    assert MODEL in assert_message_error(missing, 404, "not_found_error")
    assert_message_error(api.get("/v1/messages"), 405, "invalid_request_error")
    assert_message_error(api.get("/v1/messages/batches"), 404, "not_found_error")
    assert_message_error(api.body(b"{", "/v1/messages"), 400, "invalid_request_error")
    small = Api(max_body_bytes=10).post("/v1/messages", body)
    assert_message_error(small, 413, "request_too_large")
    for error, status, kind in (
        (OverloadedError("busy"), 429, "rate_limit_error"),
        (EngineDeadError("no rank"), 503, "overloaded_error"),
        (RuntimeError("a bug"), 500, "api_error"),
    ):
        api.backend.fail_before = error
        if status == 500:
            continue  # httpx raises what the application raises
        response = api.post("/v1/messages", body)
        assert_message_error(response, status, kind)
        assert response.headers["retry-after"] == "1"


def test_other_routes_keep_their_envelope():
    assert_error(Api().get("/v1/messagesx"), 404)
    assert_error(Api().chat(model="x"), 404, "model_not_found")


KEY = {"keys": KeyDigests(clients=(digest(b"secret"),))}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "secret"},
        {"authorization": "Bearer secret"},
        {"authorization": "Bearer other", "x-api-key": "secret"},
        {"authorization": "Bearer secret", "x-api-key": "other"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_key_in_either_header_is_enough(headers: dict[str, str], path: str):
    body = {"max_tokens": 3, "messages": HI}
    response = Api(**KEY).request("POST", path, json=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"x-api-key": "other"}, {"x-api-key": ""}, {"authorization": "secret"}]
)
def test_without_a_key_the_error_has_the_envelope_of_the_route(headers: dict[str, str]):
    response = Api(**KEY).request("POST", "/v1/messages", headers=headers)
    message = assert_message_error(response, 401, "authentication_error")
    assert "x-api-key" in message


def test_a_stored_conversation_is_refused_as_the_sdk_understands():
    """With these details the SDK's tool runner sends whole conversations from then on."""
    body = {"max_tokens": 9, "messages": HI, "thread": {"type": "create"}}
    response = Api().post("/v1/messages", body)
    error = response.json()["error"]
    assert response.status_code == 400 and "thread is not supported" in error["message"]
    assert error["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_that_no_client_can_read_are_an_empty_input(number: str):
    """Python reads and writes numbers that are no JSON; the whole message could not be read with them."""
    call = ToolCall(0, "f", parts=[f'{{"x": {number}}}'])
    (block,) = _content([CallPart(call, "")])
    assert block["input"] == {}
