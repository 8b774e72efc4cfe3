"""POST /v1/responses: whole answers and streams, judged by the openai package's types and by chat completions."""

import asyncio
import json

import pytest

from cluster.errors import EngineDeadError
from scripts.byte_tokenizer import CHAT_TEMPLATE
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, assert_error, says, tiny_tokenizer
from tests.unit.responses_case import TIME, WEATHER, kinds, respond, streamed, whole
from tests.unit.test_api_openai import with_client
from tests.unit.test_api_stream import Connection, run
from tests.unit.test_tool_parsers import CALL, tag

TEXT = "The \u20ac sign.\n\nNext\u2028line \U0001f600"
MESSAGE = [
    *("output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.done", "content_part.done", "output_item.done"),
]
THOUGHT = [
    *("output_item.added", "content_part.added", "reasoning_text.delta"),
    *("reasoning_text.done", "content_part.done", "output_item.done"),
]
CALLED = [
    *("output_item.added", "function_call_arguments.delta"),
    *("function_call_arguments.done", "output_item.done"),
]
ANSWER = "<think>\nLet me see.\n</think>\n\nFour."
CALL_TIME = '{"name": "get_time", "arguments": {}}'


def api_that_says(text, size=1, end=(IM_END,), **settings):
    return Api(FakeBackend(says(text, size=size, end=[*end])), **settings)


@pytest.fixture
def thinking(monkeypatch):
    """A model that thinks."""
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", CHAT_TEMPLATE + "{#</think>#}")


def test_a_whole_answer():
    api = api_that_says(TEXT)
    response = whole(api, max_output_tokens=100, temperature=0, metadata={"a": "b"})
    (message,) = response["output"]
    (part,) = message["content"]
    assert part == {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert message["role"] == "assistant" and message["status"] == "completed"
    assert response["id"].startswith("resp_") and message["id"].startswith("msg_")
    assert response["status"] == "completed" and response["completed_at"]
    assert response["temperature"] == 0 and response["max_output_tokens"] == 100
    assert response["metadata"] == {"a": "b"} and response["model"] == MODEL
    usage = response["usage"]
    assert usage["output_tokens"] == len(TEXT.encode()) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_stream(size):
    events = streamed(api_that_says(TEXT, size))
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "completed"]
    deltas = [e["delta"] for e in events if e["type"].endswith(".delta")]
    assert "".join(deltas) == TEXT and all(deltas)
    created, progress = (event["response"] for event in events[:2])
    assert created == progress
    assert created["status"] == "in_progress" and created["output"] == [] and not created["usage"]
    added, part = events[2]["item"], events[3]["part"]
    assert added["content"] == [] and added["status"] == "in_progress" and part["text"] == ""
    completed = events[-1]["response"]
    assert completed["output"] == [events[-2]["item"]]
    assert completed["output"][0]["content"] == [events[-3]["part"]]
    assert completed["output"][0]["content"][0]["text"] == events[-4]["text"] == TEXT
    assert {e["item_id"] for e in events if "item_id" in e} == {added["id"]}
    assert completed["id"] == created["id"]


@pytest.mark.parametrize("size", [1, 100])
def test_a_stream_is_the_whole_answer(size):
    def without_ids(output):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]

    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [WEATHER]}
    text = f"Sure.\n{tag(CALL)}\n{tag(CALL)}"
    last = streamed(api_that_says(text, size), **fields)[-1]["response"]
    answer = whole(api_that_says(text), **fields)
    assert without_ids(last["output"]) == without_ids(answer["output"])
    assert last["usage"] == answer["usage"]


def test_the_limit_of_tokens():
    response = whole(api_that_says("hello"), max_output_tokens=3)
    assert response["status"] == "incomplete" and response["completed_at"] is None
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    events = streamed(api_that_says("hello"), max_output_tokens=3)
    assert kinds(events)[-1] == "incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hel"


def test_an_answer_without_text_has_an_empty_message():
    (message,) = whole(api_that_says(""))["output"]
    assert message["content"][0]["text"] == ""
    events = streamed(api_that_says(""))
    assert "output_text.delta" not in kinds(events)
    assert kinds(events)[2:] == [*[k for k in MESSAGE if k != "output_text.delta"], "completed"]


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning(size):
    events = streamed(api_that_says(ANSWER, size))
    assert kinds(events) == ["created", "in_progress", *THOUGHT, *MESSAGE, "completed"]
    for response in (events[-1]["response"], whole(api_that_says(ANSWER))):
        thought, message = response["output"]
        assert thought["id"].startswith("rs_") and thought["summary"] == []
        assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert message["content"][0]["text"] == "Four."
        num_thought = len("<think>\nLet me see.\n</think>")
        counted = response["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert num_thought <= counted < num_thought + size
    events = streamed(api_that_says(ANSWER, size), include_reasoning=False)
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "completed"]


@pytest.mark.usefixtures("thinking")
def test_logprobs_are_those_of_the_message():
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answers = [
        whole(api_that_says(ANSWER), **fields),
        streamed(api_that_says(ANSWER), **fields)[-1]["response"],
    ]
    for response in answers:
        logprobs = response["output"][1]["content"][0]["logprobs"]
        tokens = ["\n", "\n", *"Four.", "<|im_end|>"]
        assert [entry["token"] for entry in logprobs] == tokens
        assert all(len(entry["top_logprobs"]) == 1 for entry in logprobs)
    assert whole(api_that_says("a"))["output"][0]["content"][0]["logprobs"] == []


def test_logprobs_of_events_have_no_bytes():
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = streamed(api_that_says("a\u20ac"), **fields)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 3, 1]


@pytest.mark.parametrize("size", [1, 4, 200])
def test_calls(size):
    text = f"Sure.\n{tag(CALL)}\n{tag(CALL_TIME)}"
    events = streamed(api_that_says(text, size), tools=[WEATHER, TIME])
    calls = [k for k in kinds(events) if "function_call_arguments" in k]
    assert calls == ["function_call_arguments.delta", "function_call_arguments.done"] * 2
    for response in (
        events[-1]["response"],
        whole(api_that_says(text), tools=[WEATHER, TIME]),
    ):
        message, first, second = response["output"]
        assert message["content"][0]["text"] == "Sure."
        assert first["id"].startswith("fc_") and first["call_id"].startswith("call_")
        assert (first["name"], first["arguments"]) == ("get_weather", '{"city": "Rome"}')
        assert (second["name"], second["arguments"]) == ("get_time", "{}")
        assert first["call_id"] != second["call_id"]
        assert response["status"] == "completed"
        assert [tool["name"] for tool in response["tools"]] == ["get_weather", "get_time"]
    by_item: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            by_item[event["item_id"]] = by_item.get(event["item_id"], "") + event["delta"]
    assert [*by_item.values()] == ['{"city": "Rome"}', "{}"]


def test_a_call_that_the_limit_cuts():
    events = streamed(api_that_says(tag(CALL)), tools=[WEATHER], max_output_tokens=50)
    assert kinds(events) == ["created", "in_progress", *CALLED, "incomplete"]
    (call,) = events[-1]["response"]["output"]
    assert call["status"] == "incomplete" and '{"city": "Rome"}'.startswith(call["arguments"])


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "get_time"]),
        ({"type": "function", "name": "get_time"}, ["get_time"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            ["get_weather"],
        ),
    ],
)
def test_required_calls_have_a_grammar(choice, names):
    api = api_that_says(tag(CALL_TIME))
    response = whole(api, tools=[WEATHER, TIME], tool_choice=choice)
    assert response["tool_choice"] == choice
    ((_, params),) = api.backend.requests.values()
    for name in ("get_weather", "get_time"):
        assert (f'\\"{name}\\"' in params.grammar or name in params.grammar) == (name in names)


def test_allowed_tools_alone_are_in_the_prompt():
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    api = api_that_says("a")
    whole(api, tools=[WEATHER, TIME], tool_choice=allowed)
    prompt, params = prompt_of(api)
    assert "get_weather" in prompt and "get_time" not in prompt and params.grammar is None


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def prompt_of(api):
    """The prompt and the parameters of the only request."""
    ((_, (token_ids, params)),) = api.backend.requests.items()
    return bytes(i for i in token_ids if i < 256).decode(), params


PAIRS = [
    ({"input": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}),
    (
        {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hi"},
            ],
            "max_tokens": 9,
            "temperature": 0.5,
        },
    ),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "t"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "b", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
                {"type": "function_call", "call_id": "d", "name": "get_time", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "noon"},
                {
                    "type": "function_call_output",
                    "call_id": "d",
                    "output": [{"type": "input_text", "text": "one"}],
                },
                {"role": "assistant", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "developer", "content": "z"},
            ],
            "tools": [TIME],
        },
        {
            "messages": [
                {"role": "user", "content": "a\na"},
                {
                    "role": "assistant",
                    "content": "b",
                    "reasoning_content": "t",
                    "tool_calls": [
                        {
                            "id": name,
                            "type": "function",
                            "function": {"name": "get_time", "arguments": "{}"},
                        }
                        for name in ("c", "d")
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "noon"},
                {"role": "tool", "tool_call_id": "d", "content": "one"},
                {"role": "assistant", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "developer", "content": "z"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {k: v for k, v in TIME.items() if k != "type"},
                }
            ],
        },
    ),
    (
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            },
        },
    ),
    (
        {"input": "a", "text": {"format": {"type": "json_object"}}, "top_k": 5, "stop": "x"},
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_object"},
            "top_k": 5,
            "stop": "x",
        },
    ),
]


@pytest.mark.parametrize(("body", "chat"), PAIRS)
def test_prompt_and_parameters_are_those_of_chat(body, chat):
    ours, theirs = Api(), Api()
    assert ours.post("/v1/responses", body | {"seed": 7}).status_code == 200
    assert theirs.post("/v1/chat/completions", chat | {"seed": 7}).status_code == 200
    assert prompt_of(ours) == prompt_of(theirs)


def test_truncation():
    api = api_that_says("a")
    assert_error(respond(api, "x" * 2000), 400, "context_length_exceeded")
    assert whole(api, "x" * 2000, truncation="auto")["truncation"] == "auto"
    ((token_ids, _),) = api.backend.requests.values()
    assert len(token_ids) == 999


def test_an_error_before_the_first_token_has_its_status():
    api = Api()
    api.backend.fail_before = EngineDeadError("no ranks")
    for stream in (False, True):
        assert assert_error(respond(api, stream=stream), 503)["message"] == "no ranks"


def test_an_error_in_a_stream():
    api = api_that_says("hello")
    api.backend.fail_after = (2, EngineDeadError("a rank ended"))
    *events, error, failed = streamed(api)
    assert kinds(events)[-1] == "output_text.delta"
    assert error["message"] == "a rank ended" and error["code"] == "engine_unavailable"
    response = failed["response"]
    assert failed["type"] == "response.failed" and response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "a rank ended"}
    assert response["output"][0]["content"][0]["text"] == "he"
    assert response["output"][0]["status"] == "incomplete"


def test_a_dropped_stream_frees_the_engine():
    async def test():
        api = Api()
        api.backend.hang_after = 2
        connection = Connection(api, "/v1/responses", {"input": "a", "stream": True})
        await connection.until_sent(3)
        assert len(api.backend.open) == 1
        await connection.leave()
        assert not api.backend.open and len(api.backend.aborted) == 1
        assert len(asyncio.all_tasks()) == 1

    run(test)


def test_the_official_client():
    async def call(client):
        answer = await client.responses.create(model=MODEL, input="hi")
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        return answer.output_text, "".join(deltas), final.output_text

    assert with_client(api_that_says(TEXT), call) == (TEXT,) * 3


def test_the_official_client_parses_a_call():
    async def call(client):
        async with client.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    (item,) = with_client(api_that_says(tag(CALL)), call).output
    assert item.parsed_arguments == {"city": "Rome"}
    assert json.loads(item.arguments) == {"city": "Rome"}
