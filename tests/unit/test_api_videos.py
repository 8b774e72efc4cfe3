"""Videos in chats: prompts, usage, errors with the index of the video, and what other routes refuse."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.api_fakes import Api, FakeBackend, assert_error, usage
from tests.unit.image_case import (
    END,
    PAD,
    START,
    VIDEO_PAD,
    as_file,
    image_part,
    noise,
    text_part,
    vision_api,
)
from tests.unit.test_api_images import image_tokens, last_request, turn
from tests.unit.video_case import (
    VIDEOS,
    file_url,
    frames_of,
    frames_url,
    grey_video,
    needs_av,
    video_part,
)

FRAMES = frames_url(frames_of(4))  # 2 x 6 tokens


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend("yes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def api(backend: FakeBackend, folder: Path) -> Api:
    return vision_api(backend, {"videos": VIDEOS, "allowed_folder": str(folder)})


def video_tokens(*parts: tuple[str, int]) -> list[int | str]:
    """Times, and tokens of frames behind them, between the marks of the template."""
    inner = [
        token
        for time, count in parts
        for token in (f"<{time} seconds>", START, *[VIDEO_PAD] * count, END)
    ]
    return [START, *inner, END]


def test_a_chat(api: Api, backend: FakeBackend) -> None:
    image = image_part(as_file(noise(16, 24)))
    content = [text_part("a"), video_part(FRAMES), text_part("b"), image]
    response = api.chat(content, max_tokens=3)
    assert response.status_code == 200, response.text
    prompt, images = last_request(backend)
    parts = "a", *video_tokens(("0.2", 6), ("1.2", 6)), "b", *image_tokens(6)
    assert prompt == [*turn("user", *parts), 257, *b"assistant\n"]
    assert [image.grid_thw for image in images] == [(1, 6, 4)] * 3
    for image, id_ in zip(images, (VIDEO_PAD, VIDEO_PAD, PAD), strict=True):
        assert prompt[image.offset : image.offset + image.num_tokens] == [id_] * 6
    expected = usage(len(prompt), 3)
    expected["prompt_tokens_details"] |= {"image_tokens": 6, "video_tokens": 12}
    assert response.json()["usage"] == expected
    found = api.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()
    assert found["tokens"] == prompt


def test_a_tool_shows_a_video(api: Api, backend: FakeBackend) -> None:
    messages = [
        {"role": "user", "content": "look"},
        {"role": "tool", "tool_call_id": "t", "content": [video_part(FRAMES)]},
    ]
    assert api.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert len(last_request(backend)[1]) == 2


@needs_av
def test_files(api: Api, backend: FakeBackend, folder: Path) -> None:
    (folder / "a.mp4").write_bytes(grey_video())
    prompts = []
    for url in (file_url(grey_video()), f"file://{folder}/a.mp4"):
        response = api.chat([video_part(url)], mm_processor_kwargs={"num_frames": 2}, max_tokens=1)
        assert response.status_code == 200, response.text
        prompts.append(last_request(backend)[0])
    parts = video_tokens(("0.9", 48))  # frames 0 and 19 of 10 a second
    assert prompts == [[*turn("user", *parts), 257, *b"assistant\n"]] * 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.mp4", "video 1: this server fetches no URLs"),
        (
            "file:///etc/passwd",
            "video 1: '/etc/passwd'|video 1: 'file:///etc/passwd' is no readable",
        ),
        ("ftp://example.com/a.mp4", "video 1: 'ftp://example.com/a.mp4' is no data URL"),
        ("data:video/jpeg;base64,AAAA,AAAA", "video 1: frame 0: it is no PNG"),
        (
            FRAMES.partition("base64,")[0] + "base64," + FRAMES.split(",")[1],
            "video 1: it has 1 frames",
        ),
    ],
)
def test_bad_videos_are_named_by_their_index(api: Api, url: str, message: str) -> None:
    content = [video_part(FRAMES), image_part(as_file(noise(8, 8))), video_part(url)]
    error = assert_error(api.chat(content, stream=True), 400)
    assert any(error["message"].startswith(it) for it in message.split("|"))
    assert error["param"] == "messages"


def test_what_is_refused(api: Api, backend: FakeBackend) -> None:
    blind = vision_api(backend, {"no_videos": "its processor is not known here"})
    error = assert_error(blind.chat([video_part(FRAMES)]), 400, "unsupported_content_part")
    assert error["message"].startswith("video 0: this server takes no videos: its processor")
    for part, words in (
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio is not"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "audio is not served, because"),
        ({"type": "video_url", "video_url": {"file_id": "x"}}, "videos of file ids"),
    ):
        error = assert_error(api.chat([part]), 400)
        assert words in error["message"] and error["param"].startswith("messages.0.content.0")
    body: dict[str, Any] = {
        "messages": [{"role": "assistant", "content": [video_part(FRAMES)]}],
    }
    error = assert_error(api.post("/v1/chat/completions", body), 400)
    assert "user and tool may have videos" in error["message"]
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    body = {"input": [{"role": "user", "content": [audio]}]}
    error = assert_error(api.post("/v1/responses", body), 400)
    assert "audio is not served, because no model here" in error["message"]


def test_options(api: Api, backend: FakeBackend) -> None:
    for kwargs, time in (({"fps": 1}, "0.5"), ({"fps": 4, "max_pixels": 1024}, "0.1")):
        response = api.chat([video_part(FRAMES)], mm_processor_kwargs=kwargs, max_tokens=1)
        assert response.status_code == 200, response.text
        text = bytes(id_ for id_ in last_request(backend)[0] if id_ < 256).decode()
        assert f"<{time} seconds>" in text
    for kwargs in ({"fps": -1}, {"fps": 1, "num_frames": 4}, {"frames": 4}):
        error = assert_error(api.chat([video_part(FRAMES)], mm_processor_kwargs=kwargs), 400)
        assert error["param"] == "mm_processor_kwargs"


def test_a_body_may_be_large_because_of_its_videos(backend: FakeBackend) -> None:
    api = vision_api(backend, {"videos": VIDEOS}, max_body_bytes=9000)
    url = frames_url(frames_of(4, 40, 40))
    assert len(url) > 18_000
    response = api.chat([video_part(url)], max_tokens=1)
    assert response.status_code == 200, response.text
    assert_error(api.chat([video_part(url), text_part("x" * 9000)]), 413)
