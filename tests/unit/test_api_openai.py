"""The official client understands every answer, error and stream."""

import asyncio

import httpx
import openai
import pytest

from cluster.errors import EngineDeadError, OverloadedError
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, says

TEXT = "The \u20ac sign.\n\nNext\u2028line \U0001f600"


def with_client(api: Api, call):
    """Run `await call(client)` on the application."""

    async def main():
        transport = httpx.ASGITransport(app=api.app)
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url="http://test/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        ) as client:
            return await call(client)

    return asyncio.run(main())


def speaking_api() -> Api:
    return Api(FakeBackend(says(TEXT, size=2, end=[IM_END])))


USER = [{"role": "user", "content": "hi"}]


def test_chat():
    async def call(client):
        return await client.chat.completions.create(model=MODEL, messages=USER, seed=1)

    answer = with_client(speaking_api(), call)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1


def test_chat_stream():
    async def call(client):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=900,
        )
        return [chunk async for chunk in stream]

    *chunks, last = with_client(speaking_api(), call)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == len(TEXT.encode()) + 1


def test_completion_of_several_prompts():
    async def call(client):
        return await client.completions.create(
            model=MODEL, prompt=["a", "b"], n=2, max_tokens=3, stop=["x"], temperature=0
        )

    answer = with_client(Api(), call)
    assert [choice.text for choice in answer.choices] == ["hel"] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.total_tokens == 2 + 12


def test_completion_stream():
    async def call(client):
        stream = await client.completions.create(
            model=MODEL, prompt=[104, 105], stream=True, max_tokens=500
        )
        return [chunk.choices[0] async for chunk in stream]

    choices = with_client(speaking_api(), call)
    assert "".join(choice.text for choice in choices) == TEXT
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(stream):
    async def call(client):
        fields = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2}
        answer = await client.chat.completions.create(**fields, stream=stream)
        return [chunk async for chunk in answer] if stream else [answer]

    answers = with_client(speaking_api(), call)
    shown = [answer.choices[0].logprobs for answer in answers if answer.choices[0].logprobs]
    contents = [entry for logprobs in shown for entry in logprobs.content]
    assert bytes(byte for entry in contents[:-1] for byte in entry.bytes).decode() == TEXT
    assert contents[0].token == "T" and contents[0].logprob == -1.0
    assert [(top.token, top.logprob) for top in contents[0].top_logprobs] == [
        ("U", -0.5),
        ("T", -1.0),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_with_echo(stream):
    async def call(client):
        answer = await client.completions.create(
            model=MODEL, prompt="ab", echo=True, logprobs=1, max_tokens=2, stream=stream
        )
        return [chunk async for chunk in answer] if stream else [answer]

    choices = [answer.choices[0] for answer in with_client(Api(), call)]
    assert "".join(choice.text for choice in choices) == "abhe"
    assert [t for choice in choices for t in choice.logprobs.tokens] == list("abhe")
    assert choices[0].logprobs.token_logprobs[:2] == [None, -1.0]
    assert choices[0].logprobs.top_logprobs[1] == {"c": -0.5, "b": -1.0}
    assert [o for choice in choices for o in choice.logprobs.text_offset] == [0, 1, 2, 3]


def test_fields_of_other_servers_pass_through_the_client():
    async def call(client):
        return await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            logit_bias={"5": -100},
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            stop=["zz"],
            user="me",
            extra_body={"top_k": 5, "min_tokens": 2, "priority": 1, "prompt_logprobs": 0},
        )

    api = Api(FakeBackend(says("abczz"), num_cached_tokens=4))
    answer = with_client(api, call)
    assert answer.choices[0].stop_reason == "zz"
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    ((_, params),) = api.backend.requests.values()
    assert (params.top_k, params.min_tokens, params.logit_bias) == (5, 2, ((5, -100.0),))


def test_models():
    async def call(client):
        listed = await client.models.list()
        return listed.data, await client.models.retrieve(MODEL)

    data, model = with_client(Api(), call)
    assert [item.id for item in data] == [MODEL]
    assert model.id == MODEL and model.object == "model" and model.owned_by == "phalanx"


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 5}, openai.BadRequestError, "invalid_value"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded"),
        ({"top_logprobs": 3}, openai.BadRequestError, "invalid_value"),
    ],
)
def test_bad_requests_are_typed(fields, error, code):
    async def call(client):
        arguments = {"model": MODEL, "messages": USER} | fields
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**arguments)
        return caught.value

    value = with_client(Api(), call)
    assert value.code == code
    assert value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (OverloadedError("full"), openai.RateLimitError),
        (EngineDeadError("gone"), openai.InternalServerError),
    ],
)
def test_refusals_are_typed(failure, error):
    async def call(client):
        with pytest.raises(error, match=failure.message):
            await client.completions.create(model=MODEL, prompt="a", stream=True)

    api = Api()
    api.backend.fail_before = failure
    with_client(api, call)


def test_broken_stream_raises_in_the_client():
    async def call(client):
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="rank 1 died"):
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
        return texts

    api = Api()
    api.backend.fail_after = (3, EngineDeadError("rank 1 died"))
    assert with_client(api, call) == ["h", "e", "l"]
