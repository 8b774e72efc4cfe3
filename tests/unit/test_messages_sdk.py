"""Anthropic's SDK against the application: typed answers, its accumulator of streams, its errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anthropic
import httpx2
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

from cluster.errors import EngineDeadError, OverloadedError
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, says
from tests.unit.test_messages import TIME, WEATHER
from tests.unit.test_tool_parsers import CALL, OTHER, tag

_Result = TypeVar("_Result")
HI: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "hi"}],
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Hello, w\u00f6rld", {}, {}),
    (f"Sure.\n{tag(CALL)}\n{tag(OTHER)}", {"tools": [WEATHER, TIME]}, {}),
    (tag(CALL), {"tools": [WEATHER], "max_tokens": 60}, {}),
    ("<think>hm</think>Yes.", {"thinking": {"type": "adaptive"}}, {"reasoning_parser": "think"}),
]


def with_client(
    api: Api, call: Callable[[anthropic.AsyncAnthropic], Awaitable[_Result]], **options: Any
) -> _Result:
    async def run() -> _Result:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=api.app))
        options.setdefault("api_key", "none")
        async with anthropic.AsyncAnthropic(
            base_url="http://test", max_retries=0, http_client=http, **options
        ) as client:
            return await call(client)

    return asyncio.run(run())


@pytest.mark.parametrize(("text", "fields", "settings"), CASES)
def test_answers_and_accumulated_streams_are_equal(
    text: str, fields: dict[str, Any], settings: dict[str, Any]
):
    api = Api(FakeBackend(says(text, end=[IM_END])), **settings)

    async def call(client: anthropic.AsyncAnthropic) -> list[Message]:
        whole = await client.messages.create(**HI | fields)
        async with client.messages.stream(**HI | fields) as stream:
            events = [event async for event in stream]
            assert events[-1].type == "message_stop"
            return [whole, await stream.get_final_message()]

    first, second = (m.to_dict(exclude_none=True) for m in with_client(api, call))
    for message in (first, second):
        Message.model_validate(message, strict=True)
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    if second["stop_reason"] == "max_tokens":  # the client reads the part of the JSON that came
        inputs = [message["content"][0].pop("input") for message in (first, second)]
        assert inputs[0] == {}
    assert first == second


def test_every_event_is_a_typed_one():
    api = Api(FakeBackend(says(CASES[1][0], end=[IM_END])))
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

    async def call(client: anthropic.AsyncAnthropic) -> list[Any]:
        stream = await client.messages.create(**HI, tools=[WEATHER, TIME], stream=True)
        return [event async for event in stream]

    for event in with_client(api, call):
        adapter.validate_python(event.to_dict(), strict=True)


def test_count_tokens_and_the_beta_client():
    api = Api(FakeBackend(says("x", end=[IM_END])))

    async def call(client: anthropic.AsyncAnthropic) -> tuple[int, int]:
        fields = {"model": MODEL, "messages": HI["messages"], "system": "s"}
        count = await client.messages.count_tokens(**fields)
        message = await client.beta.messages.create(
            **fields, max_tokens=9, betas=["context-1m-2025-08-07"]
        )
        return count.input_tokens, message.usage.input_tokens

    count, used = with_client(api, call)
    assert count == used > 0


def test_the_model_is_listed():
    async def call(client: anthropic.AsyncAnthropic) -> list[ModelInfo]:
        listed = [model async for model in client.models.list()]
        return [*listed, await client.models.retrieve("tiny/model")]

    first, second = with_client(Api(), call)
    assert first == second and first.id == MODEL and first.max_input_tokens == 1000
    assert first.created_at.year > 2020


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OverloadedError("busy"), anthropic.RateLimitError),
        (EngineDeadError("no rank"), anthropic.InternalServerError),
    ],
)
def test_errors_are_the_sdks(error: Exception, kind: type[anthropic.APIStatusError]):
    api = Api()
    api.backend.fail_before = error

    async def call(client: anthropic.AsyncAnthropic) -> Message:
        return await client.messages.create(**HI)

    with pytest.raises(kind) as raised:
        with_client(api, call)
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]
    assert str(error) in str(raised.value)


def test_an_error_in_a_stream_is_raised():
    backend = FakeBackend("abc")
    backend.fail_after = (3, EngineDeadError("rank 1 died"))

    async def call(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(**HI) as stream:
            async for _ in stream:
                pass

    with pytest.raises(anthropic.APIStatusError, match="rank 1 died"):
        with_client(Api(backend), call)


def test_an_unknown_model_and_a_wrong_field():
    async def call(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
        return await client.messages.create(**HI | fields)

    with pytest.raises(anthropic.NotFoundError, match="claude-x"):
        with_client(Api(), lambda client: call(client, model="claude-x"))
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content"):
        messages = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        with_client(Api(), lambda client: call(client, messages=messages))
