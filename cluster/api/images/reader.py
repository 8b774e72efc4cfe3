"""Opens the images of one request, from URLs of any kind. Knows nothing of messages or tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.images.geometry import Geometry
from cluster.api.images.opened import OpenedImage, open_image
from cluster.api.images.settings import ImageSettings
from cluster.api.images.source import (
    UnreadImages,
    check_remote,
    check_size,
    is_remote,
    numbered,
    read_source,
)
from cluster.errors import BadRequestError

_LIMITS = ("min_pixels", "max_pixels", "size")
_EDGES = ("shortest_edge", "longest_edge")


class ImageReader:
    """The images of a model with a vision tower.

    fetched   files of http(s) URLs; None: this process may not decode images, because its event loop would stop
    """

    def __init__(self, settings: ImageSettings, fetched: Mapping[str, bytes] | None = None) -> None:
        self.settings = settings
        self._fetched = fetched

    def open(self, urls: Sequence[str], options: Mapping[str, Any]) -> list[OpenedImage]:
        """Return the images of a request in order. Raises BadRequestError, and UnreadImages.

        options   `mm_processor_kwargs` of the request
        """
        settings = self.settings
        if len(urls) > settings.max_images:
            raise BadRequestError(
                f"{len(urls)} images are more than {settings.max_images} (serve.images.max_images)",
                param="messages",
            )
        geometry = _with_options(settings.geometry, options)
        remote = [(number, url) for number, url in enumerate(urls) if is_remote(url)]
        for number, url in remote:
            with numbered(number):
                check_remote(url, settings)
        if self._fetched is None or any(url not in self._fetched for _, url in remote):
            raise UnreadImages(remote)
        opened = [self._open(number, url, geometry) for number, url in enumerate(urls)]
        num_tokens, most = sum(image.num_tokens for image in opened), settings.max_request_tokens
        if most is not None and num_tokens > most:
            raise BadRequestError(
                f"the images have {num_tokens} tokens, more than {most} (cache.image_tokens); send smaller or fewer "
                "images, or lower mm_processor_kwargs.max_pixels",
                param="messages",
            )
        num_bytes = sum(image.num_bytes for image in opened)
        if num_bytes > settings.max_open_bytes:
            raise BadRequestError(
                f"the images have {num_bytes} bytes of pixels, more than {settings.max_open_bytes} "
                "(serve.images.max_open_bytes)",
                param="messages",
            )
        return opened

    def _open(self, number: int, url: str, geometry: Geometry) -> OpenedImage:
        assert self._fetched is not None, "open has checked it"
        with numbered(number):
            data = read_source(url, self.settings, self._fetched)
            check_size(len(data), self.settings)
        return open_image(number, data, geometry, self.settings.max_source_pixels)


def _with_options(geometry: Geometry, options: Mapping[str, Any]) -> Geometry:
    """Return the geometry with the limits of a request, in either spelling of transformers."""
    unknown = sorted(options.keys() - set(_LIMITS))
    if unknown:
        raise BadRequestError(
            f"mm_processor_kwargs: {unknown[0][:80]!r} cannot be set; expected {', '.join(_LIMITS)}",
            param="mm_processor_kwargs",
        )
    size = options.get("size") or {}
    if not isinstance(size, dict) or size.keys() - set(_EDGES):
        raise BadRequestError(
            f"mm_processor_kwargs.size must be an object with {' and '.join(_EDGES)}",
            param="mm_processor_kwargs",
        )
    limits = [
        options.get(name, size.get(edge)) for name, edge in zip(_LIMITS, _EDGES, strict=False)
    ]
    if any(limit is not None and type(limit) is not int for limit in limits):
        raise BadRequestError(
            "mm_processor_kwargs: limits must be whole numbers of pixels",
            param="mm_processor_kwargs",
        )
    return geometry.within(*limits)
