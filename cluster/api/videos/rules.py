"""How a model sees a video: which frames, their size, and the text between them, as transformers' processors make it.

In all families the frames of a patch along time (two) become the tokens of one image, with a time in seconds as text
beside them. So the ranks compute a video as images, and each pair of frames has a digest of its own.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from PIL import Image

from cluster.api.images.geometry import MAX_ASPECT, fitted
from cluster.api.videos.sampling import Clip, by_duration, by_seconds, evenly, thinned
from cluster.errors import BadRequestError

Style = Literal["qwen3_vl", "glm4v", "glm46v"]
OPTIONS = ("fps", "num_frames")
"""Settings of videos in `mm_processor_kwargs`."""
MAX_FPS = 120.0
# The text of a video in a chat template, which its frames replace.
_MARKERS = {"qwen3_vl": "<|video_pad|>", "glm4v": "<|video|>", "glm46v": "<|video|>"}
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_QWEN_FRAMES = "<|vision_start|><|video_pad|><|vision_end|>"
_ABOVE_LEAST = 1.05  # of the fewest pixels of a video, which a frame may have in any case


@dataclass(frozen=True, kw_only=True)
class VideoRules:
    """The video processor of a checkpoint, and the limits of the server.

    patch_size, merge_size, per_token   as of Geometry; frames of a patch
    min_pixels, max_pixels   of all frames of a resized video together
    frame_tokens     most tokens of a frame, where the processor has such a limit
    rank_tokens      most tokens of the frames of a patch, as ranks take them
    fps              frames a second that are taken
    num_frames       frames that are taken in the place of `fps`
    min_frames, max_frames   that are taken at `fps`
    max_duration     seconds up to which `fps` holds
    most_frames      of one video, by the server; more are thinned out
    resample         filter of PIL
    """

    style: Style
    patch_size: int = 16
    merge_size: int = 2
    per_token: int = 2
    min_pixels: int = 131_072
    max_pixels: int = 786_432
    frame_tokens: int | None = None
    rank_tokens: int | None = None
    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_duration: float = 300.0
    most_frames: int = 768
    resample: int = Image.Resampling.BICUBIC

    @property
    def marker(self) -> str:
        """The text of a video in a chat template."""
        return _MARKERS[self.style]

    @property
    def unit(self) -> int:
        """Pixels of a side of a token."""
        return self.patch_size * self.merge_size

    def with_options(self, fps: Any, num_frames: Any) -> Self:
        """Return the rules with those of a request, each None for no change. Raises BadRequestError."""
        if fps is None and num_frames is None:
            return self
        param = "mm_processor_kwargs"
        if fps is not None and num_frames is not None:
            raise BadRequestError(f"{param}: fps and num_frames exclude each other", param=param)
        if num_frames is not None:
            if self.style != "qwen3_vl":
                raise BadRequestError(f"{param}: this model takes no num_frames", param=param)
            if type(num_frames) is not int or not self.per_token <= num_frames <= self.most_frames:
                raise BadRequestError(
                    f"{param}.num_frames must be {self.per_token} to {self.most_frames}",
                    param=param,
                )
            return replace(self, num_frames=num_frames)
        if type(fps) not in (int, float) or not 0 < fps <= MAX_FPS:
            raise BadRequestError(
                f"{param}.fps must be more than 0 and at most {MAX_FPS:g}", param=param
            )
        return replace(self, fps=float(fps), num_frames=None)

    def frames(self, clip: Clip) -> list[int]:
        """Return the frames that are taken, in order; the last one may come twice."""
        if self.style == "qwen3_vl":
            least = max(self.min_frames, self.per_token)
            found = evenly(clip, self.fps, self.num_frames, least, self.max_frames)
        elif self.style == "glm4v":
            found = by_seconds(clip, self.fps, self.max_duration)
        else:
            found = by_duration(clip, self.per_token)
        return thinned(found, self.most_frames)

    def grid(self, num_frames: int, width: int, height: int) -> tuple[int, int, int]:
        """Return the patches along time, height and width of a video. Raises BadRequestError."""
        unit = self.unit
        scale = max(1.0, unit / min(width, height))
        tall, wide = int(height * scale), int(width * scale)
        if max(wide, tall) > MAX_ASPECT * min(wide, tall):
            raise BadRequestError(
                f"it has {width} x {height} pixels; one side may be {MAX_ASPECT} times as long as the other"
            )
        rows, columns = round(tall / unit), round(wide / unit)
        even = round(num_frames / self.per_token) * self.per_token
        area, most = even * rows * columns * unit * unit, self._most_pixels(num_frames)
        if area > most:
            shrink = math.sqrt(num_frames * tall * wide / most)
            rows = max(1, math.floor(tall / shrink / unit))
            columns = max(1, math.floor(wide / shrink / unit))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (num_frames * tall * wide))
            rows, columns = math.ceil(tall * grow / unit), math.ceil(wide * grow / unit)
        rows, columns = fitted(rows, columns, self.rank_tokens)
        times = math.ceil(num_frames / self.per_token)
        return times, rows * self.merge_size, columns * self.merge_size

    def _most_pixels(self, num_frames: int) -> int:
        """Return the most pixels of all frames of a resized video."""
        most, token = self.max_pixels, self.unit**2
        if self.frame_tokens is not None:
            frame = min(self.frame_tokens * token, most // num_frames)
            most = max(frame, int(self.min_pixels * _ABOVE_LEAST)) * num_frames
        if self.rank_tokens is not None:
            even = round(num_frames / self.per_token) * self.per_token
            most = min(most, self.rank_tokens * token * min(num_frames, even))
        return most

    def texts(self, frames: list[int], fps: float) -> list[str]:
        """Return the text of each patch along time, with one placeholder for its tokens.

        frames   that are taken
        fps      of the clip
        """
        frames = frames + frames[-1:] * (-len(frames) % self.per_token)
        times = [frame / fps for frame in frames]
        first, last = times[:: self.per_token], times[self.per_token - 1 :: self.per_token]
        if self.style == "qwen3_vl":
            middle = [(a + b) / 2 for a, b in zip(first, last, strict=True)]
            return [f"<{seconds:.1f} seconds>{_QWEN_FRAMES}" for seconds in middle]
        if self.style == "glm4v":
            return [f"{_GLM_IMAGE}{int(seconds)}" for seconds in first]
        return [f"{_GLM_IMAGE}{seconds:.1f} seconds" for seconds in first]
