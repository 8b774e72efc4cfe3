"""Images in the routes of the three APIs: prompts, usage, errors with the index of the image, limits."""

import asyncio
import base64
import json
from typing import Any

import pytest
from PIL import Image

from tests.unit.api_fakes import Api, FakeBackend, assert_error, usage
from tests.unit.image_case import (
    END,
    PAD,
    SMALL,
    START,
    as_file,
    data_url,
    image_part,
    noise,
    png,
    text_part,
    vision_api,
)
from tests.unit.test_loop_stalls import LIMIT_S, MARGIN, ticker

A, B = as_file(noise(16, 24)), as_file(noise(40, 16, 1), "JPEG")  # 6 and 10 tokens


def block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/gif", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def input_image(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), "detail": "high"}


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend("yes")


@pytest.fixture(scope="module")
def api(backend: FakeBackend) -> Api:
    """One for the module, because its process of bodies takes seconds to start."""
    return vision_api(backend)


def last_request(backend: FakeBackend) -> tuple[list[int], Any]:
    """Token ids and images of the last request."""
    request_id = list(backend.requests)[-1]
    return backend.requests[request_id][0], backend.options[request_id]["images"]


def image_tokens(count: int) -> list[int]:
    return [START, *[PAD] * count, END]


def turn(role: str, *tokens: int | str) -> list[int]:
    """The tokens of a message: 257 begins it, 258 ends it."""
    flat = [t for token in tokens for t in (token.encode() if isinstance(token, str) else [token])]
    return [257, *f"{role}\n".encode(), *flat, 258, *b"\n"]


def test_a_chat(api: Api, backend: FakeBackend) -> None:
    content = [text_part("a"), image_part(A), text_part("b"), image_part(B), image_part(A)]
    response = api.chat(content, max_tokens=3)
    assert response.status_code == 200, response.text
    prompt, images = last_request(backend)
    parts = "a", *image_tokens(6), "b", *image_tokens(10), *image_tokens(6)
    assert prompt == [*turn("user", *parts), 257, *b"assistant\n"]
    assert [image.num_tokens for image in images] == [6, 10, 6]
    for image in images:
        assert prompt[image.offset - 1 : image.offset] == [START]
        assert prompt[image.offset : image.offset + image.num_tokens] == [PAD] * image.num_tokens
        assert len(image.pixels) == image.num_tokens * SMALL.bytes_of_token
    assert images[0].digest == images[2].digest != images[1].digest
    expected = usage(len(prompt), 3)
    expected["prompt_tokens_details"]["image_tokens"] = 22
    assert response.json()["usage"] == expected


def test_anthropic_messages(api: Api, backend: FakeBackend) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(B), text_part("seen")]}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": [block(A), text_part("what?")]},
        {"role": "assistant", "content": [text_part("wait"), call]},
        {"role": "user", "content": [result, text_part("so?")]},
    ]
    body = {"max_tokens": 3, "messages": messages}
    response = api.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    prompt, images = last_request(backend)
    assert prompt == [
        *turn("user", *image_tokens(6), "what?"),
        *turn("assistant", "wait"),
        *turn("tool", *image_tokens(10), "seen"),
        *turn("user", "so?"),
        *(257, *b"assistant\n"),
    ]
    assert [image.num_tokens for image in images] == [6, 10]
    assert response.json()["usage"]["input_tokens"] == len(prompt)
    counted = api.post("/v1/messages/count_tokens", {"messages": messages})
    assert counted.json() == {"input_tokens": len(prompt)}
    result["is_error"] = True
    assert api.post("/v1/messages", body).status_code == 200
    failed = turn("tool", "Error: seen", *image_tokens(10))
    prompt, end = last_request(backend)[0], [*turn("user", "so?"), 257, *b"assistant\n"]
    assert prompt[-len(failed + end) :] == failed + end


def test_responses_with_images_and_what_follows_them(api: Api, backend: FakeBackend) -> None:
    question = {"role": "user", "content": [input_image(A), {"type": "input_text", "text": "?"}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_image(B)]}
    first = api.post("/v1/responses", {"input": [question, call, output], "max_output_tokens": 3})
    assert first.status_code == 200, first.text
    assert first.json()["usage"]["input_tokens_details"]["image_tokens"] == 16
    before, images = last_request(backend)
    assert [image.num_tokens for image in images] == [6, 10]
    again = {"previous_response_id": first.json()["id"], "input": "and?", "max_output_tokens": 3}
    assert api.post("/v1/responses", again).status_code == 200
    after, more = last_request(backend)
    assert after[: len(before)] == before and more == images
    kept = api.get(f"/v1/responses/{first.json()['id']}/input_items?order=asc").json()["data"]
    assert kept[0]["content"][0] == input_image(A) and kept[2]["output"][0] == input_image(B)


def test_tokenize_counts_the_tokens_of_images(api: Api, backend: FakeBackend) -> None:
    messages = [{"role": "user", "content": [image_part(A), text_part("?")]}]
    found = api.post("/tokenize", {"messages": messages}).json()
    assert found["tokens"] == [*turn("user", *image_tokens(6), "?"), 257, *b"assistant\n"]


def test_limits_of_a_request_in_pixels(api: Api, backend: FakeBackend) -> None:
    large = as_file(noise(64, 64))
    for kwargs, expected in (
        ({}, 64),
        ({"max_pixels": 1024}, 16),
        ({"size": {"longest_edge": 1024, "shortest_edge": 64}}, 16),
    ):
        response = api.chat([image_part(large)], mm_processor_kwargs=kwargs, max_tokens=1)
        assert response.status_code == 200, response.text
        assert last_request(backend)[1][0].num_tokens == expected
    for kwargs in ({"max_pixels": 10_000}, {"max_pixels": "1"}, {"fps": 2}, {"size": 3}):
        error = assert_error(api.chat([image_part(A)], mm_processor_kwargs=kwargs), 400)
        assert error["param"] == "mm_processor_kwargs"


BAD = {
    "no image": (data_url(b"I am a text"), "image 1: it is no PNG, JPEG, WEBP, GIF, BMP"),
    "truncated": (data_url(as_file(noise(40, 40))[:-900]), "image 1: it cannot be read"),
    "no base64": ("data:image/png;base64,@@@@", "image 1: its data URL holds no valid base64"),
    "not marked": ("data:image/png,abc", "image 1: a data URL must have the form"),
    "empty": ("data:image/png;base64,", "image 1: its data URL is empty"),
    "remote": ("https://example.com/a.png", "image 1: this server fetches no URLs"),
    "local": ("file:///etc/passwd", "image 1: this server reads no files"),
    "other scheme": (
        "ftp://example.com/a.png",
        "image 1: 'ftp://example.com/a.png' is no data URL",
    ),
    "a bomb": (data_url(png(40_000, 40_000)), "image 1: it has 40000 x 40000 pixels"),
    "long and thin": (data_url(as_file(noise(1, 300))), "image 1: it has 1 x 300 pixels"),
}


@pytest.mark.parametrize(("url", "message"), BAD.values(), ids=BAD.keys())
def test_bad_images_are_named_by_their_index(api: Api, url: str, message: str) -> None:
    bad = {"type": "image_url", "image_url": {"url": url}}
    error = assert_error(api.chat([image_part(A), bad, image_part(B)], stream=True), 400)
    assert error["message"].startswith(message) and error["param"] == "messages"


def test_errors_have_the_shape_of_their_route(api: Api) -> None:
    body: dict[str, Any] = {"input": [{"role": "user", "content": [input_image(A[:99])]}]}
    error = assert_error(api.post("/v1/responses", body), 400, "invalid_image")
    assert error["message"].startswith("image 0: it ") and error["param"] == "input"
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block(A[:99])]}]}
    response = api.post("/v1/messages", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages: image 0: it ")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {}}, "audio is not served"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "audio is not served, because no"),
        ({"type": "file", "file": {}}, "files are not served"),
        ({"type": "hologram"}, "parts may be text"),
        ({"type": ["image_url"]}, "parts may be text"),
        ({"type": "image_url", "image_url": {"uri": "x"}}, "must be {url: string} or a string"),
    ],
)
def test_parts_that_are_refused(api: Api, part: dict[str, Any], message: str) -> None:
    error = assert_error(api.chat([text_part("x"), part]), 400)
    assert message in error["message"] and error["param"].startswith("messages.0.content.1")


def test_where_images_may_be(api: Api) -> None:
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [image_part(A)]}, {"role": "user", "content": "x"}]
        error = assert_error(api.post("/v1/chat/completions", {"messages": messages}), 400)
        assert "roles user and tool" in error["message"]
    error = assert_error(api.chat([text_part("<|image_pad|>"), image_part(A)]), 400)
    assert "2 placeholders for 1 images" in error["message"]
    error = assert_error(api.chat([image_part(A)], continue_final_message=True), 400)
    assert "cannot go on" in error["message"]


def test_a_model_without_a_vision_tower() -> None:
    api = Api()
    for response in (
        api.chat([image_part(A)]),
        api.post("/v1/responses", {"input": [{"role": "user", "content": [input_image(A)]}]}),
        api.chat([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]),
    ):
        assert "has no vision tower" in assert_error(response, 400)["message"]
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": [block(A)]}]}
    assert "has no vision tower" in api.post("/v1/messages", body).json()["error"]["message"]


def test_truncated_prompts_keep_whole_images(api: Api, backend: FakeBackend) -> None:
    content = [image_part(A), text_part("and"), image_part(B)]
    whole = [*turn("user", *image_tokens(6), "and", *image_tokens(10)), 257, *b"assistant\n"]
    for keep in (len(whole) - 7, 40, 3):
        response = api.chat(content, truncate_prompt_tokens=keep, max_tokens=1)
        assert response.status_code == 200, response.text
        request_id = list(backend.requests)[-1]
        prompt = backend.requests[request_id][0]
        images = backend.options[request_id].get("images", ())
        assert len(prompt) <= keep and prompt == whole[len(whole) - len(prompt) :]
        assert prompt.count(PAD) == sum(image.num_tokens for image in images)
        for image in images:
            assert (
                prompt[image.offset : image.offset + image.num_tokens] == [PAD] * image.num_tokens
            )


def test_prompts_that_do_not_fit_are_refused_before_images_are_decoded(api: Api) -> None:
    broken = as_file(noise(64, 64))[:3000]
    error = assert_error(api.chat([image_part(broken)] * 16), 400, "context_length_exceeded")
    assert "the prompt has 1" in error["message"]


def test_limits() -> None:
    backend = FakeBackend("yes")
    limits = {"max_images": 2, "max_image_bytes": 4000, "max_source_pixels": 3000}
    api = vision_api(backend, limits | {"max_open_bytes": 20_000})
    assert "3 images are more than 2" in assert_error(api.chat([image_part(A)] * 3), 400)["message"]
    for data, name in (
        (as_file(noise(50, 50)), "max_image_bytes"),
        (as_file(Image.new("RGB", (80, 80))), "max_source_pixels"),
    ):
        error = assert_error(api.chat([image_part(A), image_part(data)]), 400)
        assert error["message"].startswith("image 1: ") and name in error["message"]
    tokens = vision_api(backend, {"max_request_tokens": 11})
    assert (
        "12 tokens, more than 11" in assert_error(tokens.chat([image_part(A)] * 2), 400)["message"]
    )
    many = [image_part(as_file(Image.new("RGB", (48, 48))))] * 2
    assert "max_open_bytes" in assert_error(api.chat(many), 400)["message"]


def test_open_requests_keep_a_bounded_number_of_bytes() -> None:
    backend = FakeBackend("yes")
    backend.hang_after = 0
    api = vision_api(backend, {"max_open_bytes": 5000})  # one image has 2,304

    async def scenario() -> None:
        async with api.client() as client:

            async def ask() -> Any:
                body = {"messages": [{"role": "user", "content": [image_part(A)]}]}
                return await client.post("/v1/chat/completions", json=body)

            open_ones = [asyncio.create_task(ask()) for _ in range(2)]
            async with asyncio.timeout(60):
                while len(backend.open) < 2:
                    await asyncio.sleep(0.01)
                error = assert_error(await ask(), 429, "overloaded")
            assert "4608 of 5000 bytes" in error["message"]
            for task in open_ones:
                task.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)
            backend.hang_after = None
            assert (await ask()).status_code == 200  # the memory is back

    asyncio.run(scenario())


def test_a_large_body_needs_images() -> None:
    limit = 100_000
    api = vision_api(FakeBackend("yes"), max_body_bytes=limit)
    noisy = as_file(noise(300, 300))
    assert len(data_url(noisy)) > 3 * limit
    assert api.chat([image_part(noisy)], max_tokens=1).status_code == 200
    too_long = "a" * limit
    assert_error(api.chat([image_part(noisy), text_part(too_long)]), 413)
    assert_error(api.chat(too_long), 413)
    assert_error(api.chat([image_part(A)], junk=[0] * limit), 413)
    for path, body in (
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [block(noisy)]}]},
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [input_image(noisy)]}]}),
    ):
        response = api.post(path, body)
        assert response.status_code == 200, response.text


def test_the_event_loop_goes_on(api: Api) -> None:
    """A body with large images, and a small one whose image takes long to decode."""
    large, small = noise(2500, 1400), as_file(noise(8, 8).resize((4000, 4000), 0))
    bodies = [
        {"messages": [{"role": "user", "content": [image_part(as_file(large, "BMP"))] * 2}]},
        {"messages": [{"role": "user", "content": [image_part(small)]}]},
    ]

    async def scenario(body: bytes) -> float:
        async with api.client() as client, ticker() as gaps:
            headers = {"content-type": "application/json"}
            response = await client.post("/v1/chat/completions", content=body, headers=headers)
            assert response.status_code == 200, response.text
        return max(gaps)

    for body in bodies:
        assert asyncio.run(scenario(json.dumps(body).encode())) < MARGIN * LIMIT_S
