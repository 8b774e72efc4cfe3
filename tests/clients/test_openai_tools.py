"""The official Python client: tool calls."""

import json

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import HELLO, HELLO_ANSWER, chat_body

NAMES = ["dict", "os.path.join"]
LOOK_UP = {
    "type": "object",
    "properties": {"name": {"enum": NAMES}, "deep": {"type": "boolean"}},
    "required": ["name", "deep"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Find it.", "parameters": LOOK_UP},
    },
    {"type": "function", "function": {"name": "now"}},
]
ONE = {"type": "function", "function": {"name": "look_up"}}
END = 2  # <|im_end|>
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"name": "dict", "deep": true}}\n</tool_call>'


@pytest.fixture
def says(ids):
    """says(text, **fields): a body with tools whose answer is this text, which begins like no call or is its end."""

    def body(text: str, **fields) -> dict:
        starts = (ids(text[:length]) for length in range(1, 8))
        pushed = {END, *(start[0] for start in starts if len(start) == 1)}
        return chat_body(
            HELLO,
            tools=TOOLS,
            logit_bias={str(i): 100 for i in pushed},
            extra_body={"structured_outputs": {"choice": [text]}},
            **{"max_tokens": 100, **fields},
        )

    return body


def gather(chunks, index: int = 0) -> tuple[str, list[dict], str | None]:
    """Content, calls and finish reason of a streamed choice."""
    content, calls, finish = "", [], None
    for choice in (c for chunk in chunks for c in chunk.choices if c.index == index):
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(calls) and delta.type == "function"
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    return content, calls, finish


def test_the_model_may_just_answer(chat):
    choice = chat(HELLO, tools=TOOLS).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert choice.message.content


def test_auto_finds_a_call_in_what_the_model_says(client, says):
    choice = client.chat.completions.create(**says("Let me see. " + CALL)).choices[0]
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.function.name == "look_up" and call.type == "function"
    assert json.loads(call.function.arguments) == {"name": "dict", "deep": True}
    assert choice.finish_reason == "tool_calls" and call.id.startswith("call_")


def test_auto_finds_several(client, says):
    text = "Two: " + CALL + "\n" + CALL.replace("dict", "os.path.join")
    stream = client.chat.completions.create(**says(text), stream=True)
    content, calls, finish = gather(stream)
    assert (content, finish) == ("Two:", "tool_calls")
    assert [json.loads(call["arguments"])["name"] for call in calls] == NAMES
    assert len({call["id"] for call in calls}) == 2


def test_only_one_when_the_client_wants_one(client, says):
    body = says("Two: " + CALL + "\n" + CALL, parallel_tool_calls=False)
    assert len(client.chat.completions.create(**body).choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("text", ["<tool_call>", "a < b", "No <tool_call>\n[1]", "No <tool_"])
def test_what_is_no_call_stays_text(client, says, text):
    message = client.chat.completions.create(**says(text)).choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    assert gather(client.chat.completions.create(**says(text), stream=True)) == (text, [], "stop")


def test_required_and_single(chat):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = chat(HELLO, **fields, max_tokens=200).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    if call.function.name == "look_up":
        jsonschema.validate(json.loads(call.function.arguments), LOOK_UP)
    else:
        assert (call.function.name, call.function.arguments) == ("now", "{}")


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_calls_the_named_tool(client, stream):
    """n > 1, a hot sample, streamed or not."""
    fields = {"tools": TOOLS, "tool_choice": ONE, "n": 3, "temperature": 1.5, "seed": 2}
    answer = client.chat.completions.create(
        **chat_body(HELLO, **{**fields, "max_tokens": 200}), stream=stream
    )
    if stream:
        found = [gather(chunks, i) for chunks in [list(answer)] for i in range(3)]
    else:
        found = [
            (
                choice.message.content or "",
                [call.function.model_dump() for call in choice.message.tool_calls],
                choice.finish_reason,
            )
            for choice in answer.choices
        ]
    for content, (call,), finish in found:
        assert (content, call["name"], finish) == ("", "look_up", "stop")
        jsonschema.validate(json.loads(call["arguments"]), LOOK_UP)


def test_a_stream_gives_what_the_whole_gives(client):
    fields = {"tools": TOOLS, "tool_choice": "required", "seed": 8, "temperature": 0.9, "n": 2}
    body = chat_body(HELLO, **fields, max_tokens=70)
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True))
    for i, choice in enumerate(whole.choices):
        content, calls, finish = gather(chunks, i)
        assert content == (choice.message.content or "") and finish == choice.finish_reason
        assert [(call["name"], call["arguments"]) for call in calls] == [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls
        ]


def test_none_hides_the_tools(chat):
    answer = chat(HELLO, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content.startswith(HELLO_ANSWER)
    assert answer.usage.prompt_tokens == chat(HELLO, max_tokens=1).usage.prompt_tokens


@pytest.mark.parametrize("max_tokens", [3, 12, 22, 30])
@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_in_the_middle_of_a_call(client, says, max_tokens, stream):
    whole = '{"name": "dict", "deep": true}'
    cut = client.chat.completions.create(
        **says("So: " + CALL, max_tokens=max_tokens), stream=stream
    )
    if stream:
        content, calls, finish = gather(cut)
    else:
        message, finish = cut.choices[0].message, cut.choices[0].finish_reason
        content = message.content or ""
        calls = [call.function.model_dump() for call in message.tool_calls or ()]
    assert finish == "length"
    if calls:
        assert content == "So:" and calls[0]["name"] == "look_up"
        assert whole.startswith(calls[0]["arguments"])
    else:
        assert ("So: " + CALL).startswith(content) and "name" not in content[25:]


def test_a_stop_string_in_a_call(client, says):
    choice = client.chat.completions.create(**says("So: " + CALL, stop=["deep"])).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.arguments == '{"name": "dict", "'
    assert choice.stop_reason == "deep"


def test_logprobs_with_a_call(client, says):
    body = says("So: " + CALL, logprobs=True, top_logprobs=1)
    choice = client.chat.completions.create(**body).choices[0]
    tokens = "".join(item.token for item in choice.logprobs.content)
    assert tokens == "So: " + CALL and choice.message.tool_calls


def test_tools_or_an_answer_of_a_form(chat):
    """With a form and tool_choice auto the model may do either."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}
    choice = chat(HELLO, tools=TOOLS, response_format=form, max_tokens=150).choices[0]
    if choice.message.tool_calls:
        assert choice.finish_reason in ("tool_calls", "length")
    else:
        assert json.loads(choice.message.content) in (1, 2)


def test_the_conversation_goes_on(chat):
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "look_up", "arguments": '{"name": "dict", "deep": false}'}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "A dict maps keys to values."},
    ]
    answer = chat(messages, tools=TOOLS, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > chat(tools=TOOLS, max_tokens=1).usage.prompt_tokens + 20


class Weather(BaseModel):
    """Tell the weather."""

    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)


def test_the_clients_own_tools(client):
    tool = openai.pydantic_function_tool(Weather)
    choice = {"type": "function", "function": {"name": "Weather"}}
    body = chat_body(HELLO, tools=[tool], tool_choice=choice, max_tokens=200, seed=1)
    parsed = client.chat.completions.parse(**body).choices[0].message.tool_calls[0]
    assert isinstance(parsed.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**body) as stream:
        events = [event for event in stream if event.type.startswith("tool_calls")]
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert final.function.parsed_arguments == parsed.function.parsed_arguments
    assert events[-1].type == "tool_calls.function.arguments.done"


def tool(**function) -> list[dict]:
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": tool(name="a b")}, "tools.0.function.name"),
        ({"tools": tool()}, "tools.0.function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools.2.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": "look_up"}, "tools"),
        ({"tools": tool(name="a", parameters=[1])}, "tools.0.function.parameters"),
        (
            {
                "tools": tool(name="a", parameters={"properties": {"b": {"type": "strin"}}}),
                "tool_choice": "required",
            },
            "tools.0.function.parameters.properties.b",
        ),
        ({"tools": tool(name="a") * 1 + [{}] * 200}, "tools"),
    ],
)
def test_broken_tools_are_refused_by_name(chat, fields, param):
    with pytest.raises(openai.BadRequestError) as info:
        chat(HELLO, **fields)
    assert info.value.param == param
