"""Computes the embeddings of images on a thread of its own, each image once, beside the steps. Knows no scheduling.

The thread takes orders as they came; an order is all that one sequence needs. It is complete when the cache holds all
its images. While it waits for room, no later order holds an image, so that no two sequences wait for what the other one
holds. Otherwise an order of images that the cache has is complete at once.
"""

import logging
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from kernels.host.host_copy import blocking_event
from kernels.host.owned import start_thread
from workers.images.cache import OutputCache
from workers.images.limits import ImageLimits
from workers.images.pace import Pace
from workers.specs.vision import Grid, VisionSpec
from workers.wire.request import ImageInput

logger = logging.getLogger(__name__)

AHEAD = 4
"""Blocks of the tower that are launched and may not have ended: enough that the GPU never waits for the thread. More
would still run beside a later step, whatever the pace allows there."""


class Tower(Protocol):
    """workers.models.vision.tower.VisionTower."""

    spec: VisionSpec
    device: torch.device

    def forward(
        self, pixels_NP: torch.Tensor, grids: Sequence[Grid], pause: Callable[[], None]
    ) -> torch.Tensor: ...


class Order:
    """The images of one sequence, computed and kept until they are released. See `workers.step.images.Embeddings`.

    complete   `of` returns the outputs of every image
    error      why it never will be complete; None: it may
    """

    def __init__(
        self, encoder: "ImageEncoder", images: Sequence[ImageInput], ready: Callable[[], None]
    ):
        self.images, self.ready = images, ready
        self.complete, self.closed = False, False
        self.error: str | None = None
        self.held: dict[bytes, torch.Tensor] = {}
        self._encoder = encoder
        self._uses = Counter(image.digest for image in images)

    def of(self, image: ImageInput) -> torch.Tensor:
        """Return the outputs [num_tokens, X, hidden_size] of an image that is held."""
        return self.held[image.digest]

    def covers(self, images: Sequence[ImageInput]) -> bool:
        """Return whether these images are held."""
        return self.complete and all(image.digest in self.held for image in images)

    def release(self, image: ImageInput) -> None:
        """Keep an image no longer, unless the sequence has it twice."""
        self._uses[image.digest] -= 1
        if not self._uses[image.digest]:
            self._encoder.release(self, image.digest)

    def close(self) -> None:
        """Release all images, and do not begin to compute one."""
        self._encoder.end(self)


class ImageEncoder:
    """The vision tower of one rank, its thread and the outputs that are kept. It outlives epochs.

    pace           set by the step loop
    token_s        seconds of a token of an image in all blocks of the tower, alone on its device; None: not measured
    num_computed, num_found   images that were computed; images that an order found in the cache
    """

    def __init__(self, tower: Tower, limits: ImageLimits):
        self.spec, self.device, self.limits, self.pace = tower.spec, tower.device, limits, Pace()
        self.token_s: float | None = None
        self.num_computed = self.num_found = 0
        self._tower, self._cache = tower, OutputCache(limits.cache)
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._idle = self._closed = self._wants_room = False
        self._broken: str | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread = start_thread(self._run, self._break, "images")

    def order(self, images: Sequence[ImageInput], ready: Callable[[], None]) -> Order:
        """Begin to compute images; `ready` is called on the encoder's thread, unless the order is complete at once."""
        order = Order(self, images, ready)
        with self._changed:
            order.error = self._broken
            found = [self._cache.find(image.digest) is not None for image in images]
            self.num_found += sum(found)
            if all(found) and not self._wants_room:
                self._hold(order)
            elif order.error is None:
                self._orders.append(order)
                self._notify()
        return order

    def release(self, order: Order, digest: bytes) -> None:
        """Take an image from an order."""
        with self._changed:
            if order.held.pop(digest, None) is not None:
                self._cache.release(digest)
            self._notify()

    def end(self, order: Order) -> None:
        """Take all images from an order, which gets no more."""
        with self._changed:
            order.closed = True
            while order.held:
                self._cache.release(order.held.popitem()[0])
            self._notify()

    def compute(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """Return the outputs of images, each in memory of its own; on the calling thread."""
        pixels = np.concatenate([np.frombuffer(image.pixels, dtype=np.uint8) for image in images])
        pixels_NP = torch.from_numpy(pixels.reshape(-1, self.spec.patch_dim))
        sizes = [image.num_tokens for image in images]
        grids = [image.grid_thw for image in images]
        outputs_TXD = self._tower.forward(pixels_NP.to(self.device), grids, self._pause(images))
        if len(images) == 1:
            return [outputs_TXD]
        return [part.clone() for part in torch.split(outputs_TXD, sizes)]

    def _pause(self, images: Sequence[ImageInput]) -> Callable[[], None]:
        """Return what waits before each block of a call with these images."""
        share = sum(map(self._cost, images)) / self.spec.depth
        launched: deque[torch.cuda.Event] = deque()

        def pause() -> None:
            if self.device.type == "cuda":
                if len(launched) == AHEAD:
                    launched.popleft().synchronize()
                launched.append(blocking_event())
            self.pace.take(share)

        return pause

    def measure(self, image: ImageInput, clock: Callable[[], float] = time.perf_counter) -> None:
        """Set `token_s` by the blocks of one image; on the calling thread, while nothing else runs on the device."""
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(-1, self.spec.patch_dim)
        pixels_NP = torch.from_numpy(pixels.copy()).to(self.device)
        times: list[float] = []

        def mark() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(clock())

        self._tower.forward(pixels_NP, [image.grid_thw], mark)
        mark()
        # The median: kernels may load in the first block, and the last one has the outputs behind it.
        block_s = statistics.median(after - before for before, after in pairwise(times))
        self.token_s = block_s * self.spec.depth / self._cost(image)

    def _cost(self, image: ImageInput) -> float:
        """Return the tokens of an image as large as a batch that take the tower as long as this image.

        A larger image has more attention a token, and a smaller one does not fill a GPU.
        """
        spec, (_, height, width) = self.spec, image.grid_thw
        usual = spec.patch_flops(self.limits.batch * spec.merged)
        return image.num_tokens * max(1.0, spec.patch_flops(height * width) / usual)

    def wait(self) -> None:
        """Wait until no order can go on."""
        self.pace.free()
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._closed)

    def close(self) -> None:
        """End the thread behind the images that it computes now. Orders get no answer."""
        self.pace.free()
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._notify()
        self._thread.join()

    def _notify(self) -> None:
        self._idle = False
        self._changed.notify_all()

    def _hold(self, order: Order) -> bool:
        """Hold the images of an order that the cache has; return whether these are all."""
        for image in order.images:
            found = None if image.digest in order.held else self._cache.find(image.digest)
            if found is not None:
                self._cache.hold(image.digest)
                order.held[image.digest] = found
        order.complete = len(order.held) == len({image.digest for image in order.images})
        return order.complete

    def _run(self) -> None:
        device = self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        while (images := self._next()) is not None:
            self._compute(images)

    def _next(self) -> list[ImageInput] | None:
        """Complete orders, then wait for images to compute, and return them; None: the encoder is closed."""
        while True:
            completed: list[Order] = []
            with self._changed:
                while not self._closed and self._orders and self._first_is_done():
                    completed.append(self._orders.popleft())
                if not completed:
                    if self._closed:
                        return None
                    images = self._choose()
                    self._wants_room = bool(self._orders) and not images
                    if images:
                        return images
                    self._idle = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._idle)
            for order in completed:
                if not order.closed:
                    order.ready()

    def _first_is_done(self) -> bool:
        order = self._orders[0]
        return order.closed or order.error is not None or self._hold(order)

    def _choose(self) -> list[ImageInput]:
        """Return the next images to compute: of the first order, and of later ones if they fit beside them."""
        chosen: dict[bytes, ImageInput] = {}
        total = 0
        for order in self._orders:
            for image in order.images:
                known = image.digest in chosen or self._cache.find(image.digest) is not None
                if known or order.closed:
                    continue
                if chosen and total + image.num_tokens > self.limits.batch:
                    return list(chosen.values())
                if not self._cache.make_room(total + image.num_tokens):
                    return list(chosen.values())
                chosen[image.digest] = image
                total += image.num_tokens
        return list(chosen.values())

    def _compute(self, images: list[ImageInput]) -> None:
        try:
            if self._stream is None:
                outputs = self.compute(images)
            else:
                with torch.cuda.stream(self._stream):
                    outputs = self.compute(images)
                self._stream.synchronize()
        except Exception as error:
            if len(images) > 1:
                for image in images:
                    self._compute([image])
                return
            logger.exception("an image was not computed")
            with self._changed:
                for order in self._orders:
                    if any(image.digest == images[0].digest for image in order.images):
                        order.error = f"an image of the request was not computed: {error}"
            return
        with self._changed:
            self.num_computed += len(images)
            for image, outputs_TXD in zip(images, outputs, strict=True):
                self._cache.put(image.digest, outputs_TXD)

    def _break(self, error: BaseException) -> None:
        """Answer all orders, now and later, with the error that ended the thread."""
        logger.error("the thread of images failed", exc_info=error)
        with self._changed:
            self._broken = f"this rank takes no images any more: {error}"
            orders, self._orders = list(self._orders), deque()
            self._idle = True
        for order in orders:
            order.error = self._broken
            order.ready()
