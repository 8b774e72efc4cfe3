"""Video files of clients: which frames are read, turns, lists of frames, and files that cannot be read."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from cluster.api.images.medium import numbered
from cluster.api.images.reader import ImageReader
from cluster.api.images.settings import ImageSettings
from cluster.api.videos import source as subject
from cluster.api.videos.opened import OpenedVideo
from cluster.api.videos.source import FrameList, VideoFile
from cluster.errors import BadRequestError
from tests.unit.image_case import PAD, SMALL, as_file, noise, png
from tests.unit.video_case import (
    RULES,
    VIDEOS,
    file_url,
    frames_of,
    frames_url,
    grey_video,
    needs_av,
    video_at,
)

LIMIT = 2**20
QUARTER_TURN = (0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
NO_TURN = (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)


def greys(video: OpenedVideo) -> list[int]:
    """The values of the frames that the model gets, of a grey video."""
    per_token, side = video.rules.per_token, video.rules.patch_size
    found: list[int] = []
    for part in video.parts:
        pixels = np.frombuffer(part.read(0).pixels, np.uint8)
        frames = pixels.reshape(-1, 3, per_token, side, side).mean((0, 1, 3, 4))
        found += [round(value) for value in frames]
    return found


@needs_av
@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
    ],
)
def test_formats(container: str, codec: str) -> None:
    source = VideoFile(grey_video(container=container, codec=codec), LIMIT)
    clip = source.clip
    assert (clip.num_frames, clip.fps, clip.width, clip.height) == (20, 10.0, 64, 48)
    video = OpenedVideo.of(video_at(""), source, RULES, sampled=False)
    assert video.frames == [0, 6, 13, 19]  # 2 a second
    assert np.allclose(greys(video), [0, 60, 130, 190], atol=3)
    assert [text.split(" ")[0] for text in video.texts] == ["<0.3", "<1.6"]
    assert sum(part.num_tokens for part in video.parts) == 2 * 6 * 8  # 48 x 64 pixels
    seven = RULES.with_options(None, 7)
    odd = OpenedVideo.of(video_at(""), source, seven, sampled=False)
    assert np.allclose(greys(odd), [0, 30, 60, 100, 130, 160, 190, 190], atol=3)


@needs_av
@pytest.mark.parametrize(
    ("container", "codec"),
    [("matroska", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("mp4", "libx264")],
)
def test_a_rate_that_varies(container: str, codec: str) -> None:
    """The rate is that of the frames, as transformers' decoder has it: a recording's header has its highest rate."""
    times = list(np.cumsum([500, 33, 33, 900, 33, 1200, 33, 33, 700, 1000]))
    data = grey_video(10, rate=30, container=container, codec=codec, times=times)
    source = VideoFile(data, LIMIT)
    assert source.clip.num_frames == 10
    # From the first frame to the end of the last one, which is as long as the header or the frame before has it.
    assert 10 / 5 < source.clip.fps < 10 / 3.9
    video = OpenedVideo.of(video_at(""), source, RULES, sampled=False)
    assert len(video.frames) >= 7  # two of each of about four seconds


@needs_av
def test_a_single_frame() -> None:
    """GLM takes it twice, Qwen takes two frames at least: so do transformers' processors."""
    source = VideoFile(grey_video(1), LIMIT)
    for style in ("glm4v", "glm46v"):
        rules = replace(RULES, style=style)
        video = OpenedVideo.of(video_at(""), source, rules, sampled=False)
        assert video.frames == [0, 0] and len(video.texts) == len(video.parts) == 1
        assert np.allclose(greys(video), [0, 0], atol=3)
    with pytest.raises(BadRequestError, match="video 0: it has 1 frames; expected at least 2"):
        OpenedVideo.of(video_at(""), source, RULES, sampled=False)


@needs_av
def test_a_turned_video() -> None:
    data = grey_video(4, size=(64, 32))
    plain, turned = (
        b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
        for matrix in (NO_TURN, QUARTER_TURN)
    )
    place = data.index(plain, data.index(b"tkhd"))
    source = VideoFile(data[:place] + turned + data[place + len(plain) :], LIMIT)
    video = OpenedVideo.of(video_at(""), source, RULES, sampled=False)
    (frame, *_) = source.read([0])
    assert frame.size == (32, 64)
    wide = OpenedVideo.of(video_at(""), VideoFile(data, LIMIT), RULES, sampled=False)
    (times, rows, columns), first = wide.grid, video.parts[0].read(0)
    assert first.grid_thw == (1, columns, rows) and first.num_tokens == wide.parts[0].num_tokens
    assert times == len(video.parts)


@needs_av
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "cannot be read as MP4, MOV, MKV, WebM, AVI"),
        (lambda data: b"no video at all" * 99, "cannot be read as MP4"),
        (lambda data: as_file(noise(9, 9)), "cannot be read as MP4"),
        (lambda data: data[: len(data) // 3], "cannot be read as MP4"),
        (lambda data: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "cannot be read as MP4"),
        (lambda data: b"ffconcat version 1.0\nfile /etc/passwd\n", "cannot be read as MP4"),
    ],
    ids=["empty", "text", "image", "truncated", "playlist", "concat"],
)
def test_files_that_cannot_be_read(change, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as error:
        VideoFile(change(grey_video()), LIMIT)
    assert error.value.code == "invalid_image"


@needs_av
def test_frames_that_are_broken() -> None:
    data = bytearray(grey_video(container="avi", codec="mpeg4"))
    first = data.index(b"00dc", data.index(b"movi"))
    data[first + 8 :] = bytes(len(data) - first - 8)
    with pytest.raises(BadRequestError, match=r"cannot be (decoded|read)|has no frames"):
        list(VideoFile(bytes(data), LIMIT).read([0, 19]))


@needs_av
def test_the_size_of_a_frame_is_checked_first() -> None:
    with pytest.raises(
        BadRequestError, match=r"64 x 48 pixels, more than 3000 .*max_source_pixels"
    ):
        VideoFile(grey_video(4), 3000)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert not subject.is_installed()
    with pytest.raises(
        BadRequestError, match=r"PyAV is not installed \(pip install 'phalanx\[video\]'\)"
    ):
        VideoFile(b"any", LIMIT)


def test_lists_of_frames() -> None:
    frames = frames_of(5, 16, 24)
    reader = ImageReader(ImageSettings(token_id=PAD, geometry=SMALL, videos=VIDEOS), {})
    for kind in ("PNG", "BMP"):  # the content counts
        (video,) = reader.open([video_at(frames_url(frames, kind))], {"fps": 4})
        assert isinstance(video, OpenedVideo) and video.frames == [0, 1, 2, 3, 4]
        assert [text.split(" ")[0] for text in video.texts] == ["<0.1", "<0.6", "<1.0"]
        pixels = np.frombuffer(video.parts[-1].read(0).pixels, np.uint8)
        assert pixels.size == 6 * SMALL.bytes_of_token
        (again,) = reader.open([video_at(frames_url([*frames, frames[-1]], "PNG"))], {})
        assert again.parts[-1].read(0).digest == video.parts[-1].read(0).digest


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([as_file(noise(8, 8)), b"no image"], "video 2: frame 1: it is no PNG"),
        (
            [as_file(noise(8, 8)), as_file(noise(8, 9))],
            "video 2: frame 1 has 8 x 9 pixels, frame 0",
        ),
        ([as_file(noise(8, 8))], "video 2: it has 1 frames; expected at least 2"),
        ([png(4000, 4000)] * 2, "video 2: frame 0: it has 4000 x 4000 pixels, more than 1048576"),
        ([as_file(noise(1, 201))] * 2, "video 2: it has 1 x 201 pixels; one side may be 200 times"),
    ],
)
def test_lists_that_cannot_be_read(files: list[bytes], message: str) -> None:
    medium = video_at("", 2)
    with pytest.raises(BadRequestError, match=message) as error:
        with numbered(medium):
            source = FrameList(files, LIMIT, 2.0)
        OpenedVideo.of(medium, source, RULES, sampled=True)
    assert error.value.param == "messages"


def test_a_broken_frame_is_found_when_it_is_decoded() -> None:
    whole = as_file(noise(40, 40))
    source = FrameList([whole, whole[:900]], LIMIT, 2.0)
    video = OpenedVideo.of(video_at("", 1), source, RULES, sampled=True)
    with pytest.raises(BadRequestError, match="video 1: frame 1: it cannot be read"):
        video.parts[0].read(0)


def test_limits() -> None:
    few = replace(VIDEOS, rules=replace(RULES, most_frames=4), max_videos=1, max_video_bytes=4000)
    settings = ImageSettings(
        token_id=PAD, geometry=SMALL, videos=few, max_request_tokens=20, max_images=0
    )
    reader = ImageReader(settings, {})

    def refused(*urls: str) -> str:
        with pytest.raises(BadRequestError) as error:
            reader.open([video_at(url, number) for number, url in enumerate(urls)], {})
        return error.value.message

    small = frames_url(frames_of(2, 8, 8))
    assert "2 videos are more than 1 (serve.videos.max_videos)" in refused(small, small)
    assert "more than 4 frames (serve.videos.max_frames)" in refused(frames_url(frames_of(5, 8, 8)))
    large = frames_url([Image.new("RGB", (40, 40))] * 4)
    assert "have 50 tokens, more than 20 (cache.image_tokens)" in refused(large)
    assert "serve.videos.max_video_bytes" in refused(frames_url(frames_of(4, 40, 40)))
    assert "serve.videos.max_video_bytes" in refused(file_url(bytes(5000)))
    assert "no valid base64" in refused("data:video/jpeg;base64,@@,@@")
    assert "its data URL is empty" in refused("data:video/jpeg;base64,")
    none = ImageReader(replace(settings, videos=None, no_videos="its processor is unknown"), {})
    with pytest.raises(
        BadRequestError, match="video 0: this server takes no videos: its processor"
    ):
        none.open([video_at(small)], {})
