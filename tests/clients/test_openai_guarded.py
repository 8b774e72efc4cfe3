"""The official Python clients on a server with a key, a short queue, a time limit, and a model that thinks."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from tests.clients.conftest import (
    HELLO,
    HELLO_ANSWER,
    KEY,
    MAX_RUNNING,
    MAX_WAITING,
    TIMEOUT_S,
    chat_body,
    completion_body,
)

ENDLESS = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def client(guarded) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("key", ["wrong", KEY + "x", KEY[:-1]])
def test_a_wrong_key(guarded, key):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as stranger:
        for call in (
            stranger.models.list,
            lambda: stranger.completions.create(**completion_body("x")),
        ):
            with pytest.raises(openai.AuthenticationError) as info:
                call()
            assert info.value.code == "invalid_api_key" and KEY not in str(info.value.body)


def test_too_many_at_once(guarded):
    """Refused ones get a RateLimitError; a client that may try again gets them all answered."""
    full = MAX_RUNNING + MAX_WAITING  # however slowly clients send, two requests overlap

    async def ask(retries: int, choices: int) -> list:
        async with openai.AsyncOpenAI(
            base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=retries
        ) as many:
            body = completion_body("x", max_tokens=12, n=choices, extra_body={"ignore_eos": True})
            calls = (many.completions.create(**body) for _ in range(12))
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(ask(0, full))
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert 0 < len(refused) < len(answers)
    for error in refused:
        assert isinstance(error, openai.RateLimitError) and error.code == "overloaded"
        assert int(error.response.headers["retry-after"]) >= 1
    answers = asyncio.run(ask(12, 1))
    assert {answer.usage.completion_tokens for answer in answers} == {12}
    assert len({answer.choices[0].text for answer in answers}) == 1
    guarded.wait_free()


def test_more_choices_than_the_queue_holds(client):
    """Choices count one by one."""
    most = MAX_RUNNING + MAX_WAITING
    with pytest.raises(openai.BadRequestError, match=str(most)) as info:
        client.completions.create(**completion_body("x", n=most + 1))
    assert info.value.param == "n"
    answer = client.completions.create(**completion_body("x", n=most, max_tokens=1))
    assert len(answer.choices) == most


def late_answer(client: openai.OpenAI) -> None:
    started = time.monotonic()
    with pytest.raises(openai.InternalServerError) as info:
        client.completions.create(**completion_body("x", **ENDLESS))
    assert (info.value.status_code, info.value.code) == (504, "timeout")
    assert time.monotonic() - started > TIMEOUT_S - 0.1


def late_stream(client: openai.OpenAI, begun: threading.Barrier) -> None:
    stream = client.completions.create(**completion_body("x", **ENDLESS), stream=True)
    next(stream)
    begun.wait()
    with pytest.raises(openai.APIError) as error:
        list(stream)
    assert error.value.code == "timeout"


def late_response(client: openai.OpenAI, begun: threading.Barrier) -> None:
    """The client passes the error on as an event, and the response so far has failed."""
    endless = {"max_output_tokens": 2000, "extra_body": {"ignore_eos": True}, "stream": True}
    events = iter(client.responses.create(model="demo", input="Hello", **endless))
    while next(events).type != "response.output_text.delta":
        pass
    begun.wait()
    *_, error, last = events
    assert (error.type, last.type) == ("error", "response.failed")
    assert error.code == "timeout" and last.response.status == "failed"


def test_the_time_limit(client, guarded):
    """All at once, because each takes that time. The ranks are suspended once the streams have begun."""
    begun, ranks = threading.Barrier(3, timeout=TIMEOUT_S), guarded.ranks()
    with ThreadPoolExecutor(3) as pool:
        late = [pool.submit(ask, client, begun) for ask in (late_stream, late_response)]
        try:
            begun.wait()
            for rank in ranks:
                rank.suspend()
            late.append(pool.submit(late_answer, client))
            for asked in late:
                asked.result()
        finally:
            begun.abort()
            for rank in ranks:
                rank.resume()
    guarded.wait_free()


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_no_content(client, stream):
    """The answer goes on behind what is echoed, so that a model that does not think has thought."""
    begun = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello! I am a"}
    flags = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = client.chat.completions.create(
        **chat_body([*HELLO, begun], max_tokens=6, stream=stream), extra_body=flags
    )
    reasoning = content = ""
    for part in answer if stream else [answer]:
        message = part.choices[0].delta if stream else part.choices[0].message
        content += message.content or ""
        reasoning += getattr(message, "reasoning_content", None) or ""
    assert reasoning == "A greeting." and len(content) > 15 and content.startswith("Hello! I am a ")


def test_a_thought_that_max_tokens_cut(client):
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(**chat_body(HELLO, max_tokens=6), extra_body=body)
    message = answer.choices[0].message
    assert message.content is None and message.reasoning_content == message.reasoning != ""
    assert answer.choices[0].finish_reason == "length"
    hidden = client.chat.completions.create(
        **chat_body(HELLO, max_tokens=6), extra_body={**body, "include_reasoning": False}
    )
    assert hidden.choices[0].message.content in (None, "")
    assert hidden.choices[0].message.reasoning_content is None
    assert hidden.usage.completion_tokens == 6


def test_no_thought_where_the_prompt_closed_it(client):
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    message = client.chat.completions.create(**chat_body(HELLO, max_tokens=6), extra_body=body)
    message = message.choices[0].message
    assert message.content and message.reasoning_content is None


def test_without_a_thought_the_answer_is_content(client):
    message = client.chat.completions.create(**chat_body(HELLO)).choices[0].message
    assert message.content.startswith(HELLO_ANSWER) and message.reasoning_content is None


def test_a_form_behind_the_thought(client):
    """The grammar begins where the prompt has closed the thought."""
    body = {"chat_template_kwargs": {"enable_thinking": False}, "guided_choice": ["red", "green"]}
    answer = client.chat.completions.create(**chat_body(HELLO, max_tokens=9), extra_body=body)
    assert answer.choices[0].message.content in ("red", "green")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_as_plain_json(client, stream):
    """A template without <tool_call> tags: the model writes its calls as JSON."""
    answer = client.chat.completions.create(
        **chat_body(HELLO, tools=TOOLS, tool_choice="required", max_tokens=60, stream=stream),
        parallel_tool_calls=False,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    name, arguments, finish = None, "", None
    for part in answer if stream else [answer]:
        choice = part.choices[0]
        message = choice.delta if stream else choice.message
        assert not message.content
        finish = choice.finish_reason or finish
        for call in message.tool_calls or ():
            name = call.function.name or name
            arguments += call.function.arguments
    assert (name, json.loads(arguments), finish) == ("now", {}, "tool_calls")


@pytest.fixture
def claude(guarded) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as client:
        yield client


def message_body(**fields) -> dict:
    """Arguments of a message."""
    return {"model": "demo", "max_tokens": 6, "messages": HELLO, **fields}


def test_keys_of_messages(guarded, claude):
    assert claude.messages.create(**message_body()).content
    for key in ({"api_key": "wrong"}, {"auth_token": "wrong"}, {"auth_token": KEY}):
        with anthropic.Anthropic(base_url=guarded.url, max_retries=0, **key) as other:
            if key == {"auth_token": KEY}:
                assert other.messages.create(**message_body()).content
                continue
            with pytest.raises(anthropic.AuthenticationError) as info:
                other.messages.create(**message_body())
            assert info.value.body["error"]["type"] == "authentication_error"


@pytest.fixture
def thought(client) -> str:
    """The beginning of the demo's greedy thought, in a chat completion."""
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(**chat_body(HELLO, max_tokens=6), extra_body=body)
    return answer.choices[0].message.reasoning_content


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_of_a_message(claude, thought, stream):
    body = message_body(
        thinking={"type": "enabled", "budget_tokens": 1024}, extra_body={"temperature": 0}
    )
    if stream:
        with claude.messages.stream(**body) as events:
            deltas = [event.thinking for event in events if event.type == "thinking"]
            message = events.get_final_message()
        assert "".join(deltas) == thought
    else:
        message = claude.messages.create(**body)
    (block,) = message.content
    assert (block.type, block.thinking, message.stop_reason) == ("thinking", thought, "max_tokens")
    silent = claude.messages.create(**body | {"thinking": {"type": "disabled"}})
    assert [block.type for block in silent.content] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_of_a_response(client, thought, stream):
    body = {"model": "demo", "input": "Hello", "temperature": 0, "max_output_tokens": 6}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    response = client.responses.create(**body, extra_body=extra, stream=stream)
    if stream:
        events = list(response)
        deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought
        response = events[-1].response
    assert [item.type for item in response.output] == ["reasoning"]
    assert response.output[0].content[0].text == thought and response.status == "incomplete"
    assert response.usage.output_tokens_details.reasoning_tokens == 6
