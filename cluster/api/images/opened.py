"""Reads image files of clients: the header first, the pixels later. Knows nothing of requests.

The content of a file decides its format. An animation is read as its first frame. Transparent parts become white.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cluster.api.images.geometry import Geometry
from cluster.api.images.medium import INVALID, MediaKind, Medium, numbered
from cluster.errors import BadRequestError
from workers.wire.request import ImageInput

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def prepare() -> None:
    """Prepare a process for children that decode images: each child would import the formats again.

    PIL's limit of pixels goes, because `open_image` has one with a better error; a process of a user keeps it.
    """
    Image.init()
    Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class OpenedImage:
    """An image file after its header was read.

    medium       for errors
    num_tokens   of its placeholders
    """

    medium: Medium
    data: bytes
    geometry: Geometry
    num_tokens: int
    kind: MediaKind = "image"

    @property
    def parts(self) -> "list[OpenedImage]":
        """Itself; a video has several."""
        return [self]

    @property
    def num_bytes(self) -> int:
        """Bytes of its patches."""
        return self.num_tokens * self.geometry.bytes_of_token

    def read(self, offset: int) -> ImageInput:
        """Return the patches, for placeholders from `offset` on. Raises BadRequestError."""
        with numbered(self.medium), decoding():
            image = as_rgb(self.data)
            pixels = self.geometry.patches(image).tobytes()
            grid = (1, *self.geometry.grid(*image.size))
        return as_input(offset, self.num_tokens, grid, self.geometry.patch_size, pixels)


def as_input(
    offset: int, num_tokens: int, grid: tuple[int, int, int], patch_size: int, pixels: bytes
) -> ImageInput:
    """Return patches as ranks take them, with their digest."""
    digest = hashlib.sha256(repr((grid, patch_size)).encode())
    digest.update(pixels)
    return ImageInput(
        offset=offset,
        num_tokens=num_tokens,
        grid_thw=grid,
        digest=digest.digest(),
        pixels=pixels,
    )


def open_image(medium: Medium, data: bytes, geometry: Geometry, max_pixels: int) -> OpenedImage:
    """Read the header of an image. Raises BadRequestError.

    max_pixels   width times height of the file, which is not decoded beyond it
    """
    with numbered(medium):
        # An image that is turned by its exif data has as many tokens.
        num_tokens = geometry.num_tokens(*size_of(data, max_pixels))
    return OpenedImage(medium, data, geometry, num_tokens)


def size_of(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image from its header. Raises BadRequestError."""
    with decoding():
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
        if width * height > max_pixels:
            raise BadRequestError(
                f"it has {width} x {height} pixels, more than {max_pixels} (serve.images.max_source_pixels)"
            )
    return width, height


@contextmanager
def decoding() -> Iterator[None]:
    """Raise errors of PIL, which has many kinds for data that is wrong, as errors of the client."""
    try:
        yield
    except BadRequestError:
        raise
    except UnidentifiedImageError:
        raise BadRequestError(f"it is no {', '.join(FORMATS)}", code=INVALID) from None
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise BadRequestError(f"it cannot be read: {reason}", code=INVALID) from None


def as_rgb(data: bytes) -> Image.Image:
    """Return the first frame, turned as its exif data has it, in 8 bits a colour."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        opened.load()
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith(
        ("I", "F")
    ):  # 16 bits of grey, which `convert` would cut and not scale
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    over = image.convert("RGBA")
    white = Image.new("RGBA", over.size, "white")
    return Image.alpha_composite(white, over).convert("RGB")
