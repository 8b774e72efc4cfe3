"""Sizes of images behind the processor of a model, and their patches, as transformers' processors on PIL make them.

transformers' own classes import torch, which takes seconds and 300 MB of the process, and copy the pixels as float32:
eight times the processor time of this module for 1,024 x 1,024 pixels, and four times its memory. The tests compare all
sizes and patches with those classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from PIL import Image

from cluster.errors import BadRequestError

MAX_ASPECT = 200
_COLOURS = 3


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How images are resized and cut into patches.

    patch_size     pixels of a side of a patch
    merge_size     merge_size x merge_size patches become one token
    frames         copies of an image in a patch
    min_pixels, max_pixels   of a resized image
    counts_frames  as GLM-4.5V has it: both limits count the pixels of all frames, and an image smaller than a token is
                   enlarged before all else
    resample       filter of PIL
    rank_tokens    most tokens of an image, as ranks take them; None: no limit beside `max_pixels`
    """

    patch_size: int = 16
    merge_size: int = 2
    frames: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    counts_frames: bool = False
    resample: int = Image.Resampling.BICUBIC
    rank_tokens: int | None = None

    @property
    def bytes_of_token(self) -> int:
        """Bytes of the patches of a token."""
        return _COLOURS * self.frames * (self.patch_size * self.merge_size) ** 2

    def within(self, min_pixels: int | None, max_pixels: int | None) -> Self:
        """Return the geometry with other limits, each None for no change. Raises BadRequestError.

        A limit may not pass `max_pixels` of this geometry, because memory of the ranks is set aside for it.
        """
        most = self.max_pixels
        for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
            if value is not None and not 1 <= value <= most:
                raise BadRequestError(
                    f"{name} is {value}; this server takes 1 to {most}", param="mm_processor_kwargs"
                )
        # A limit alone moves the other one along, as no image fits between limits that cross.
        found_max = most if max_pixels is None else max_pixels
        found_min = min(self.min_pixels, found_max) if min_pixels is None else min_pixels
        if found_min > found_max:
            raise BadRequestError(
                f"min_pixels = {found_min} is more than max_pixels = {found_max}",
                param="mm_processor_kwargs",
            )
        return replace(self, min_pixels=found_min, max_pixels=found_max)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches of an image of `width` x `height` pixels. Raises BadRequestError."""
        unit = self.patch_size * self.merge_size
        frames, scale = 1, 1.0
        if self.counts_frames:
            frames, scale = self.frames, max(1.0, unit / min(width, height))
        tall, wide = int(height * scale), int(width * scale)
        if max(wide, tall) > MAX_ASPECT * min(wide, tall):
            raise BadRequestError(
                f"it has {width} x {height} pixels; one side may be {MAX_ASPECT} times as long as the other"
            )
        rows, columns = round(tall / unit), round(wide / unit)
        area = frames * rows * columns * unit * unit
        if area > self.max_pixels:
            shrink = math.sqrt(frames * tall * wide / self.max_pixels)
            rows = max(1, math.floor(tall / shrink / unit))
            columns = max(1, math.floor(wide / shrink / unit))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * tall * wide))
            rows, columns = math.ceil(tall * grow / unit), math.ceil(wide * grow / unit)
        rows, columns = fitted(rows, columns, self.rank_tokens)
        return rows * self.merge_size, columns * self.merge_size

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image. Raises BadRequestError."""
        rows, columns = self.grid(width, height)
        return rows * columns // self.merge_size**2

    def patches(self, image: Image.Image) -> np.ndarray:
        """Return the patches of an RGB image: uint8 [N, patch_dim], by blocks of merged patches.

        The values of a patch are [colours, frames, patch_size, patch_size].
        """
        return cut(
            [resized(image, self.grid(*image.size), self.patch_size, self.resample)],
            self.patch_size,
            self.merge_size,
            self.frames,
        )


def fitted(rows: int, columns: int, most: int | None) -> tuple[int, int]:
    """Return rows and columns of at most `most` tokens; the longer side is cut. most: None: no limit.

    The processors exceed their own limit where they round sides up, and with sides of less than one token.
    """
    if most is None or rows * columns <= most:
        return rows, columns
    if rows > columns:
        return most // columns, columns
    return rows, most // rows


def resized(
    image: Image.Image, grid: tuple[int, int], patch_size: int, resample: int
) -> Image.Image:
    """Return an image in the size of a grid of patches (rows, columns)."""
    size = grid[1] * patch_size, grid[0] * patch_size
    return image.resize(size, Image.Resampling(resample))


def cut(images: Sequence[Image.Image], patch_size: int, merge_size: int, frames: int) -> np.ndarray:
    """Return the patches of RGB images of one size: uint8 [N, patch_dim], by blocks of merged patches.

    images   one for each frame of a patch, or one for all
    """
    side, merge = patch_size, merge_size
    pixels = np.stack([np.asarray(image) for image in images])
    blocks = pixels.shape[1] // (side * merge), pixels.shape[2] // (side * merge)
    parts = pixels.reshape(-1, blocks[0], merge, side, blocks[1], merge, side, _COLOURS)
    found = np.empty((*blocks, merge, merge, _COLOURS, frames, side, side), np.uint8)
    found[:] = parts.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    return found.reshape(blocks[0] * blocks[1] * merge**2, -1)
