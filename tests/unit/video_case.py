"""Videos for tests: lists of frames, files that PyAV encodes, and rules of a small model."""

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cluster.api.images.medium import Medium
from cluster.api.videos.rules import VideoRules
from cluster.api.videos.settings import VideoSettings
from cluster.api.videos.source import is_installed
from tests.unit.image_case import VIDEO_PAD, as_file, noise

RULES = VideoRules(
    style="qwen3_vl", patch_size=4, min_pixels=128, max_pixels=2**14, min_frames=2, max_frames=16
)
"""8 x 8 pixels a token; two frames a token; at most 128 tokens."""
VIDEOS = VideoSettings(token_id=VIDEO_PAD, rules=RULES)
needs_av = pytest.mark.skipif(not is_installed(), reason="PyAV is not installed (the extra video)")


def video_at(url: str, number: int = 0) -> Medium:
    """A video of a request by its URL."""
    return Medium("video", number, url)


def frames_of(count: int, width: int = 16, height: int = 24, seed: int = 0) -> list[Image.Image]:
    """Images of random pixels."""
    return [noise(width, height, seed * 1000 + number) for number in range(count)]


def frames_url(frames: list[Image.Image], kind: str = "PNG") -> str:
    """A video as a list of images."""
    texts = [base64.b64encode(as_file(frame, kind)).decode() for frame in frames]
    return "data:video/jpeg;base64," + ",".join(texts)


def video_part(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def file_url(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def grey_video(
    count: int = 20,
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    container: str = "mp4",
    codec: str = "libx264",
    times: Sequence[int] | None = None,
) -> bytes:
    """A video whose frame i is grey with the value 10 i.

    times   of the frames, in milliseconds; None: by the rate
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as opened:
        stream: Any = opened.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 10 * number % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            for packet in stream.encode(frame):
                opened.mux(packet)
        for packet in stream.encode():
            opened.mux(packet)
    return file.getvalue()
