"""The images of one sequence: positions of its tokens, and the embeddings that it holds. Knows no tower.

A token of an image has three positions: time, row and column. A token of text has one position three times, which
counts on behind an image by the longer side of the image. T tokens of the prompt, X outputs of the vision tower.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from math import isqrt, prod
from typing import Protocol

import numpy as np
import torch

from workers.wire.request import ImageInput

_DIGEST_BYTES = 32


class Embeddings(Protocol):
    """Outputs of the vision tower for some images of a sequence, kept until they are released.

    complete   they can be had
    error      why they never can; None: they can, or will
    """

    complete: bool
    error: str | None

    def of(self, image: ImageInput) -> torch.Tensor:
        """Return the outputs [num_tokens, X, hidden_size] of an image that is held."""

    def covers(self, images: Sequence[ImageInput]) -> bool:
        """Return whether these images are held."""

    def release(self, image: ImageInput) -> None:
        """Keep an image no longer for this sequence. Once for each image."""

    def close(self) -> None:
        """Release all images."""


class SequenceImages:
    """The images of a sequence with `num_tokens` prompt tokens.

    positions   int64 [T, 3], of the prompt
    delta       position of a token behind the prompt, less its place in the sequence; never above 0
    held        the embeddings of images with tokens that are still to be computed; None: none were ordered
    """

    def __init__(self, images: Sequence[ImageInput], num_tokens: int):
        self.images = images
        self.positions, self.delta = _positions(images, num_tokens)
        self.held: Embeddings | None = None
        # Of them those with tokens that no launched step computes.
        self._ahead: deque[ImageInput] = deque()

    def from_token(self, start: int) -> tuple[ImageInput, ...]:
        """Return the images with tokens from `start` on."""
        return tuple(it for it in self.images if it.offset + it.num_tokens > start)

    def contents(self, first: int, end: int, block_size: int) -> dict[int, bytes]:
        """Return what stands in the blocks from `first` to `end`, by the place of the block among them.

        A digest for each image of the block, and its place in the block. Blocks of text are left out.
        """
        found: defaultdict[int, bytes] = defaultdict(bytes)
        for image in self.images:
            last = (image.offset + image.num_tokens - 1) // block_size
            if last < first or image.offset >= end * block_size:
                continue  # the frames of a video are hundreds of images
            digest = hashlib.blake2b(image.digest, digest_size=_DIGEST_BYTES, person=b"image")
            digest.update(repr(image.grid_thw).encode())
            for block in range(max(first, image.offset // block_size), min(end, last + 1)):
                place = (image.offset - block * block_size).to_bytes(8, "little", signed=True)
                found[block - first] += digest.digest() + place
        return dict(found)

    def rows(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield for each image with tokens from `start` to `end` the first of these tokens, and their outputs."""
        for image in self.images:
            first, last = max(start, image.offset), min(end, image.offset + image.num_tokens)
            if first < last:
                assert self.held is not None, "the sequence runs without its embeddings"
                yield first, self.held.of(image)[first - image.offset : last - image.offset]

    def hold(self, embeddings: Embeddings, images: Iterable[ImageInput]) -> None:
        """Hold the embeddings of these images, which are in order."""
        assert self.held is None, "the sequence holds embeddings already"
        self.held, self._ahead = embeddings, deque(images)

    def covers(self, images: Sequence[ImageInput]) -> bool:
        """Return whether the embeddings of these images can be had."""
        return not images or (self.held is not None and self.held.covers(images))

    @property
    def pending(self) -> bool:
        """Whether embeddings were ordered that may still come."""
        return self.held is not None and not self.held.complete and self.held.error is None

    @property
    def error(self) -> str | None:
        """Why embeddings that were ordered never come."""
        return None if self.held is None else self.held.error

    def launched(self, num_tokens: int) -> None:
        """Release images of which launched steps compute all tokens."""
        while self._ahead and self._ahead[0].offset + self._ahead[0].num_tokens <= num_tokens:
            assert self.held is not None
            self.held.release(self._ahead.popleft())

    def release(self) -> None:
        """Release all images."""
        self._ahead.clear()
        if self.held is not None:
            self.held.close()
            self.held = None


def _positions(images: Sequence[ImageInput], num_tokens: int) -> tuple[np.ndarray, int]:
    """Return `positions` and `delta`, as transformers' `get_rope_index` of Qwen3-VL counts them."""
    positions = np.empty((num_tokens, 3), dtype=np.int64)
    place = position = 0  # of the next token
    for image in images:
        text = image.offset - place
        positions[place : image.offset] = np.arange(position, position + text)[:, None]
        position += text
        place = image.offset + image.num_tokens
        merge = isqrt(prod(image.grid_thw) // image.num_tokens)
        sides = image.grid_thw[0], image.grid_thw[1] // merge, image.grid_thw[2] // merge
        positions[image.offset : place] = np.indices(sides).reshape(3, -1).T + position
        position += max(sides[1:])
    positions[place:] = np.arange(position, position + num_tokens - place)[:, None]
    delta = position - place
    return positions, delta


def problem_of(images: Sequence[ImageInput], num_tokens: int) -> str | None:
    """Return why these are no images of a prompt of `num_tokens` tokens; None: they are."""
    end = 0
    for number, image in enumerate(images):
        if image.num_tokens < 1 or image.offset < end:
            return f"image {number} has {image.num_tokens} tokens from {image.offset} on; expected at least {end}"
        end = image.offset + image.num_tokens
        if end > num_tokens:
            return f"image {number} ends at token {end} of a prompt of {num_tokens}"
    return None
