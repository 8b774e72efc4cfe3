"""Videos of clients behind their headers: which frames become tokens, and their patches. Knows nothing of requests."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from PIL import Image

from cluster.api.images.geometry import cut, resized
from cluster.api.images.medium import INVALID, MediaKind, Medium, numbered
from cluster.api.images.opened import as_input
from cluster.api.videos.rules import VideoRules
from cluster.api.videos.source import Frames
from cluster.errors import BadRequestError
from workers.wire.request import ImageInput


@dataclass(frozen=True)
class OpenedVideo:
    """A video with the frames that are taken of it.

    frames   their numbers in `source`
    """

    medium: Medium
    source: Frames
    rules: VideoRules
    frames: list[int]

    @classmethod
    def of(
        cls, medium: Medium, source: Frames, rules: VideoRules, *, sampled: bool
    ) -> "OpenedVideo":
        """Choose the frames of a video. Raises BadRequestError. sampled: the client has chosen them."""
        clip = source.clip
        with numbered(medium):
            frames = list(range(clip.num_frames)) if sampled else rules.frames(clip)
            if len(frames) < rules.per_token:  # GLM takes a single frame twice
                raise BadRequestError(
                    f"it has {clip.num_frames} frames; expected at least {rules.per_token}",
                    code=INVALID,
                )
            found = cls(medium, source, rules, frames)
            assert found.grid[0] == len(found.texts), (found.grid, found.texts)
        return found

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Patches along time, height and width, if no frame is turned."""
        clip = self.source.clip
        return self.rules.grid(len(self.frames), clip.width, clip.height)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each part, with one placeholder."""
        return self.rules.texts(self.frames, self.source.clip.fps)

    @cached_property
    def parts(self) -> list["VideoPart"]:
        """The frames that become tokens together, in order."""
        times, rows, columns = self.grid
        num_tokens = rows * columns // self.rules.merge_size**2
        return [VideoPart(self, number, num_tokens) for number in range(times)]

    @cached_property
    def patches(self) -> list[tuple[tuple[int, int], bytes]]:
        """Rows and columns of the patches of each part, and their pixels. Raises BadRequestError."""
        with numbered(self.medium):
            return list(self._patches())

    def _patches(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        rules, clip = self.rules, self.source.clip
        missing = -len(self.frames) % rules.per_token
        images: list[Image.Image] = []
        grid: tuple[int, int] | None = None
        for image in self.source.read(self.frames + self.frames[-1:] * missing):
            if grid is None:  # all frames are turned as the first one
                turned = (image.width > image.height) != (clip.width > clip.height)
                size = (clip.height, clip.width) if turned else (clip.width, clip.height)
                grid = rules.grid(len(self.frames), *size)[1:]
            images.append(resized(image, grid, rules.patch_size, rules.resample))
            if len(images) == rules.per_token:
                pixels = cut(images, rules.patch_size, rules.merge_size, rules.per_token)
                yield grid, pixels.tobytes()
                images = []


@dataclass(frozen=True)
class VideoPart:
    """Frames of a video that become the tokens of one image."""

    video: OpenedVideo = field(repr=False)
    number: int
    num_tokens: int
    kind: MediaKind = "video"

    @property
    def num_bytes(self) -> int:
        """Bytes of its patches."""
        rules = self.video.rules
        return self.num_tokens * 3 * rules.per_token * rules.unit**2

    def read(self, offset: int) -> ImageInput:
        """Return the patches, for placeholders from `offset` on. Raises BadRequestError."""
        grid, pixels = self.video.patches[self.number]
        return as_input(offset, self.num_tokens, (1, *grid), self.video.rules.patch_size, pixels)
