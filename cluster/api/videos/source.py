"""Frames of videos: of files that PyAV decodes, and of lists of images. Knows nothing of models.

The content of a file decides its format. Neither a playlist nor another file that a file names is opened.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from PIL import Image

from cluster.api.images.medium import INVALID
from cluster.api.images.opened import as_rgb, decoding, size_of
from cluster.api.videos.sampling import UNKNOWN_FPS, Clip
from cluster.errors import BadRequestError

FORMATS = "MP4, MOV, MKV, WebM, AVI"
_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi",
    "codec_whitelist": "h264,hevc,vp8,vp9,av1,libdav1d,libvpx,libvpx-vp9,mpeg4,mjpeg",
    "protocol_whitelist": "none",
}
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
}


class Frames(Protocol):
    """The frames of a video."""

    clip: Clip

    def read(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Yield these frames, which never fall, in RGB. Raises BadRequestError."""


def is_installed() -> bool:
    """Return whether video files can be decoded here."""
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


class VideoFile:
    """A file, of which the frames are counted without decoding them.

    max_pixels   width times height of a frame, beyond which nothing is decoded
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        self._data, self._max_pixels = data, max_pixels
        with _decoding(), self._opened() as (container, stream):
            count, seconds = _scan(container, stream)
            rate = float(stream.average_rate or stream.guessed_rate or UNKNOWN_FPS)
            width, height = stream.width, stream.height
        if not count or min(width, height) < 1:
            raise BadRequestError("it has no frames", code=INVALID)
        if width * height > max_pixels:
            raise BadRequestError(
                f"it has {width} x {height} pixels, more than {max_pixels} (serve.images.max_source_pixels)"
            )
        # The header of a recording in Matroska or WebM has the highest rate, not that of the frames.
        self.clip = Clip(count, count / seconds if seconds > 0 else rate, width, height)

    def read(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Yield these frames, turned as the file has it."""
        wanted = list(numbers)
        with _decoding(), self._opened() as (container, stream):
            for number, frame in enumerate(container.decode(stream)):
                if not wanted:
                    return
                if number < wanted[0]:
                    continue
                image = frame.to_image()
                if (turn := _TURNS.get(round(frame.rotation))) is not None:
                    image = image.transpose(turn)
                while wanted and wanted[0] == number:
                    wanted.pop(0)
                    yield image
        if wanted:
            raise BadRequestError(
                f"frame {wanted[0]} of {self.clip.num_frames} cannot be decoded", code=INVALID
            )

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """Open the file; yield its container and its stream of frames."""
        try:
            import av
        except ImportError:
            raise BadRequestError(
                "this server decodes no video files, because PyAV is not installed (pip install 'phalanx[video]'); "
                "send frames as data:video/jpeg;base64,FRAME,FRAME,..."
            ) from None
        with av.open(io.BytesIO(self._data), options=_OPTIONS, metadata_errors="ignore") as found:
            if not found.streams.video:
                raise BadRequestError("it has no frames", code=INVALID)
            stream = found.streams.video[0]
            # Decoders count pixels of padding too. One thread: the time of a body is processor time.
            stream.codec_context.options = {"max_pixels": str(2 * self._max_pixels)}
            stream.codec_context.thread_count = 1
            yield found, stream


class FrameList:
    """Frames as images of one size.

    fps   frames a second, as they were taken
    """

    def __init__(self, files: Sequence[bytes], max_pixels: int, fps: float) -> None:
        self._files = files
        sizes = []
        for number, file in enumerate(files):
            with _of_frame(number):
                sizes.append(size_of(file, max_pixels))
        for number, size in enumerate(sizes):
            if size != sizes[0]:
                raise BadRequestError(
                    f"frame {number} has {size[0]} x {size[1]} pixels, frame 0 has {sizes[0][0]} x {sizes[0][1]}",
                    code=INVALID,
                )
        self.clip = Clip(len(files), fps, *sizes[0])

    def read(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Yield these frames."""
        for number in numbers:
            with _of_frame(number), decoding():
                image = as_rgb(self._files[number])
            yield image


def _scan(container: Any, stream: Any) -> tuple[int, float]:
    """Return the frames, and the seconds from the start of the first one to the end of the last one; 0: unknown.

    Packets are counted and not decoded, as torchcodec does it, which transformers reads videos with.
    """
    count, start, end = 0, math.inf, -math.inf
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        count += 1
        time = packet.dts if packet.pts is None else packet.pts
        if time is not None:
            start, end = min(start, time), max(end, time + (packet.duration or 0))
    return count, max(0.0, float((end - start) * stream.time_base))


@contextmanager
def _of_frame(number: int) -> Iterator[None]:
    """Raise errors of the client as errors of a frame."""
    try:
        yield
    except BadRequestError as error:
        raise BadRequestError(f"frame {number}: {error.message}", code=error.code) from None


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise errors of PyAV as errors of the client."""
    try:
        yield
    except BadRequestError:
        raise
    except Exception as error:
        reason = str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
        raise BadRequestError(f"it cannot be read as {FORMATS}: {reason}", code=INVALID) from None
