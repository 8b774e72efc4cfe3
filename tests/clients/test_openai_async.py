"""The official asynchronous Python client: many at once, and leaving at any moment."""

import asyncio

import openai
import pytest

from tests.clients.conftest import HELLO, chat_body, completion_body

ENDLESS = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def with_client(server):
    """with_client(call): the result of `await call(client)`."""

    def run(call):
        async def main():
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="x", max_retries=0
            ) as client:
                return await call(client)

        return asyncio.run(main())

    return run


def test_many_at_once_are_what_each_is_alone(with_client, complete):
    bodies = [completion_body(f"Topic {i % 4}", seed=i % 4, temperature=0.8) for i in range(24)]

    async def call(client):
        return await asyncio.gather(*(client.completions.create(**body) for body in bodies))

    texts = [answer.choices[0].text for answer in with_client(call)]
    alone = [complete(**body).choices[0].text for body in bodies[:4]]
    assert texts == alone * 6


def test_streams_at_once_keep_apart(with_client, chat):
    topics = ["textwrap.dedent", "os.path.join", "dict.get", "list.sort"]
    asked = [[{"role": "user", "content": f"What does {topic} do?"}] for topic in topics]

    async def read(client, messages) -> str:
        stream = await client.chat.completions.create(
            **chat_body(messages, max_tokens=24, stream=True)
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def call(client):
        return await asyncio.gather(*(read(client, messages) for messages in asked * 3))

    alone = [chat(messages, max_tokens=24).choices[0].message.content for messages in asked]
    assert with_client(call) == alone * 3


def test_the_streaming_helper(with_client):
    async def call(client):
        async with client.chat.completions.stream(**chat_body(HELLO)) as stream:
            texts = [event.delta async for event in stream if event.type == "content.delta"]
            return texts, await stream.get_final_completion()

    texts, final = with_client(call)
    assert "".join(texts) == final.choices[0].message.content


@pytest.mark.parametrize("how", ["break", "close", "cancel"])
def test_leaving_a_stream_frees_its_request(with_client, server, how):
    """After some tokens, by each way that a program may go."""

    async def read(client, seen: asyncio.Event) -> None:
        stream = await client.completions.create(**completion_body("x", **ENDLESS), stream=True)
        count = 0
        async for _ in stream:
            count += 1
            if count == 3:
                seen.set()
                if how != "cancel":
                    break
        assert how != "cancel", "it ended"
        if how == "close":
            await stream.close()

    async def call(client):
        seen = asyncio.Event()
        task = asyncio.create_task(read(client, seen))
        await seen.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (how == "cancel")

    with_client(call)
    server.wait_free()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
def test_cancelling_a_whole_answer_frees_its_request(with_client, server, after_s):
    """While it is sent, parsed, queued or running."""

    async def call(client):
        body = completion_body(["x"] * 4, **ENDLESS)
        task = asyncio.create_task(client.completions.create(**body))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_client(call)
    server.wait_free()


def test_closing_the_client_ends_its_streams(with_client, server):
    async def call(client):
        for _ in range(5):
            stream = await client.completions.create(**completion_body("x", **ENDLESS), stream=True)
            await anext(aiter(stream))

    with_client(call)
    server.wait_free()


def test_a_timeout_between_tokens_is_not_reached(with_client):
    """The client's timeout is for each read: a long stream passes."""

    async def call(client):
        body = completion_body("x", max_tokens=150, extra_body={"ignore_eos": True})
        stream = await client.with_options(timeout=20.0).completions.create(**body, stream=True)
        return [chunk.choices[0].finish_reason async for chunk in stream]

    reasons = with_client(call)
    assert reasons[-1] == "length" and len(reasons) > 50


def test_priorities_do_not_change_what_is_said(with_client):
    async def call(client):
        bodies = [
            completion_body("Once", extra_body={"priority": priority})
            for priority in (5, -5, 0, 2**31 - 1, -(2**31 - 1))
        ]
        return await asyncio.gather(*(client.completions.create(**body) for body in bodies))

    assert len({answer.choices[0].text for answer in with_client(call)}) == 1
