"""A request that ends in its rank without a token: a 400 if its own rules forbid all tokens, a 500 for bad logits."""

import pytest

from tests.unit.api_fakes import Api, FakeBackend, assert_error, events
from tests.unit.responses_case import respond, stream_events
from tests.unit.test_messages_errors import assert_message_error
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS, error_of

FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]


def api(cause: int, step: int = 0) -> Api:
    backend = FakeBackend()
    backend.error_output, backend.error_step = error_of(cause, step), step
    return Api(backend)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [65], "guided_regex": "b+"}, ["allowed_token_ids", "guided_regex"]),
        (
            {"bad_words": ["x"], "guided_choice": ["x"], "min_tokens": 2},
            ["bad_words", "guided_choice"],
        ),
        ({"allowed_token_ids": [65], "bad_words": ["AA"]}, ["allowed_token_ids", "bad_words"]),
    ],
)
def test_forbidden_tokens_are_the_clients_error(fields, named, n, stream):
    for route in (Api.complete, Api.chat):
        served = api(ALL_FORBIDDEN)
        response = route(served, stream=stream, n=n, **fields)
        error = assert_error(response, 400, "no_token_allowed")
        assert error["type"] == "invalid_request_error" and error["param"] == named[0]
        assert error["message"] == f"no token is allowed as output token 1 by {' and '.join(named)}"
        assert "retry-after" not in response.headers and not served.backend.open


def test_forbidden_tokens_after_some_text_end_the_stream_with_an_error():
    for route in (Api.complete, Api.chat):
        response = route(api(ALL_FORBIDDEN, 2), stream=True, guided_regex="b+", bad_words=["bbb"])
        assert response.status_code == 200
        *items, last = events(response)
        assert len(items) >= 2 and last["error"]["code"] == "no_token_allowed"
        assert last["error"]["type"] == "invalid_request_error"
        assert "output token 3 by bad_words and guided_regex" in last["error"]["message"]


def test_forbidden_tokens_of_a_tool_call_name_the_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = api(ALL_FORBIDDEN).chat(
        tools=tools, tool_choice="required", allowed_token_ids=[65], temperature=0
    )
    assert assert_error(response, 400)["message"].endswith("by allowed_token_ids and tools")


def test_forbidden_tokens_of_a_response():
    fields = {"text": {"format": {**FORMAT, "name": "a"}}, "allowed_token_ids": [65]}
    error = assert_error(respond(api(ALL_FORBIDDEN), **fields), 400, "no_token_allowed")
    assert error["message"].endswith("by allowed_token_ids and text.format.schema")
    found = stream_events(respond(api(ALL_FORBIDDEN, 2), stream=True, **fields))
    error, last = found[-2:]
    assert (error["type"], error["code"]) == ("error", "no_token_allowed")
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == (
        "invalid_prompt"
    )


def test_forbidden_tokens_of_a_message():
    body = {"max_tokens": 9, "messages": HI, "output_config": {"format": FORMAT}}
    response = api(ALL_FORBIDDEN).post("/v1/messages", body)
    message = assert_message_error(response, 400, "invalid_request_error")
    assert message == "no token is allowed as output token 1 by output_config.format.schema"


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_logits_are_the_servers_error(stream):
    fields = {"stream": stream, "allowed_token_ids": [65]}
    for route in (Api.complete, Api.chat):
        response = route(api(INVALID_LOGITS), **fields)
        error = assert_error(response, 500, "invalid_logits")
        assert error["type"] == "server_error" and "a logit is NaN" in error["message"]
        assert "retry-after" not in response.headers
