"""A server of a tiny Qwen3.5 with its vision tower: official clients send images, a rank dies, bad ones are refused."""

import base64
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.serve.server import Server, running
from tests.unit.image_case import (
    PAD,
    VIDEO_PAD,
    add_vision_tokens,
    as_file,
    data_url,
    image_part,
    noise,
)
from tests.unit.video_case import frames_of, frames_url, video_part

A, B = as_file(noise(40, 24)), as_file(noise(64, 64, 1), "JPEG")  # 15 and 64 tokens
SIZES = {"num_layers": 3, "hidden_size": 32, "num_experts": 6, "vocab_size": 384}
QUESTION = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def eyes(
    tmp_path_factory: pytest.TempPathFactory, server: Server, ray_address: str
) -> Iterator[Server]:
    """In the Ray of the shared server."""
    folder = tmp_path_factory.mktemp("images")
    checkpoint = make_checkpoint(
        folder / "model",
        family="qwen3_5_moe",
        vision=True,
        image_token_id=PAD,
        video_token_id=VIDEO_PAD,
        **SIZES,
    )
    add_vision_tokens(checkpoint)
    (folder / "media").mkdir()
    (folder / "media" / "a.png").write_bytes(A)
    with running(
        folder,
        checkpoint,
        joins=server,
        model={"max_model_len": 1024, "dtype": "float32"},
        cache={"num_blocks": 512},
        serve={"model_name": "eyes", "allowed_media_folder": str(folder / "media")},
    ) as found:
        yield found


@pytest.fixture(scope="module")
def client(eyes: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{eyes.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *parts: Any, **fields: Any) -> Any:
    options = {"model": "eyes", "temperature": 0, "max_tokens": 8, **fields}
    return client.chat.completions.create(
        messages=[{"role": "user", "content": [*parts, QUESTION]}], **options
    )


def test_openai_chat(client: openai.OpenAI, eyes: Server) -> None:
    first = ask(client, image_part(A))
    again = ask(client, image_part(A))
    file = {"type": "image_url", "image_url": {"url": f"file://{eyes.log.parent}/media/a.png"}}
    assert first.usage.prompt_tokens_details.image_tokens == 15
    texts = {answer.choices[0].message.content for answer in (first, again, ask(client, file))}
    assert len(texts) == 1
    other = ask(client, image_part(as_file(noise(40, 24, 5))))
    assert other.usage.prompt_tokens == first.usage.prompt_tokens
    assert other.choices[0].message.content != first.choices[0].message.content
    both = ask(client, image_part(A), image_part(B))
    assert both.usage.prompt_tokens_details.image_tokens == 79


def test_a_video(client: openai.OpenAI) -> None:
    video = video_part(frames_url(frames_of(4, 40, 24)))
    first, again = ask(client, video, image_part(A)), ask(client, video, image_part(A))
    details = first.usage.prompt_tokens_details
    assert (details.image_tokens, details.video_tokens) == (15, 30)
    assert first.choices[0].message.content == again.choices[0].message.content
    other = ask(client, video_part(frames_url(frames_of(4, 40, 24, 1))), image_part(A))
    assert other.usage.prompt_tokens == first.usage.prompt_tokens
    assert other.choices[0].message.content != first.choices[0].message.content


def test_a_stream_with_an_image_outlives_its_rank(client: openai.OpenAI, eyes: Server) -> None:
    """Both ranks hold such a stream, so the death of either moves one with its image."""
    fields = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    expected = ask(client, image_part(B), **fields).choices[0].message.content
    streams = [ask(client, image_part(B), stream=True, **fields) for _ in range(2)]
    texts = [
        next(stream).choices[0].delta.content + next(stream).choices[0].delta.content
        for stream in streams
    ]
    eyes.ranks()[1].kill()
    for text, stream in zip(texts, streams, strict=True):
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == expected
    eyes.wait_free(60)


def test_responses_with_images(client: openai.OpenAI, eyes: Server) -> None:
    look = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    seen = {"type": "input_image", "image_url": data_url(B), "detail": "auto"}
    first = client.responses.create(
        model="eyes",
        max_output_tokens=8,
        temperature=0,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(A), "detail": "auto"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            },
            look,
            {"type": "function_call_output", "call_id": "c", "output": [seen]},
        ],
    )
    assert first.usage.input_tokens_details.image_tokens == 79  # type: ignore[attr-defined]
    again = client.responses.create(
        model="eyes", max_output_tokens=8, previous_response_id=first.id, input="And now?"
    )
    assert again.usage.input_tokens > first.usage.input_tokens + 8


def test_anthropic_messages(client: openai.OpenAI, eyes: Server) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(A).decode()}
    image = {"type": "image", "source": source}
    with anthropic.Anthropic(base_url=eyes.url, api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(
            model="eyes",
            max_tokens=8,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": [image, QUESTION]}],
        )
        with pytest.raises(anthropic.BadRequestError, match="image 0: it cannot be read"):
            image["source"] = source | {"data": base64.b64encode(A[:200]).decode()}
            claude.messages.create(
                model="eyes", max_tokens=8, messages=[{"role": "user", "content": [image]}]
            )
    expected = ask(client, image_part(A))
    assert answer.content[0].text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens


def test_bad_images_leave_nothing(client: openai.OpenAI, eyes: Server) -> None:
    bad = {"type": "image_url", "image_url": {"url": data_url(b"I am a text")}}
    for _ in range(3):
        with pytest.raises(openai.BadRequestError, match="image 1: it is no PNG"):
            ask(client, image_part(A), bad, stream=True)
    started = time.monotonic()
    large = {"type": "image_url", "image_url": {"url": data_url(bytes(50_000_000))}}
    with pytest.raises(openai.BadRequestError, match="image 0: it has more than 20971520 bytes"):
        ask(client, large)
    assert time.monotonic() - started < 60
    eyes.wait_free(60)
