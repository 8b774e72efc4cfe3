"""Opens the images and videos of one request, from URLs of any kind. Knows nothing of messages or tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.images.geometry import Geometry
from cluster.api.images.medium import Medium, UnreadImages, numbered
from cluster.api.images.opened import OpenedImage, open_image
from cluster.api.images.settings import ImageSettings
from cluster.api.images.source import FRAME_LIST, check_remote, is_remote, read_frames, read_source
from cluster.api.videos.opened import OpenedVideo
from cluster.api.videos.rules import OPTIONS as OF_VIDEOS
from cluster.api.videos.rules import VideoRules
from cluster.api.videos.source import FrameList, VideoFile
from cluster.errors import BadRequestError

_LIMITS = ("min_pixels", "max_pixels", "size")
_EDGES = ("shortest_edge", "longest_edge")


class ImageReader:
    """The images and videos of a model with a vision tower.

    fetched   files of http(s) URLs; None: this process may not decode images, because its event loop would stop
    """

    def __init__(self, settings: ImageSettings, fetched: Mapping[str, bytes] | None = None) -> None:
        self.settings = settings
        self._fetched = fetched

    def open(
        self, media: Sequence[Medium], options: Mapping[str, Any]
    ) -> list[OpenedImage | OpenedVideo]:
        """Return the images and videos of a request in order. Raises BadRequestError, and UnreadImages.

        options   `mm_processor_kwargs` of the request
        """
        settings = self.settings
        self._check_counts(media)
        known = (*_LIMITS, *(OF_VIDEOS if settings.videos else ()))
        if unknown := sorted(options.keys() - set(known)):
            raise BadRequestError(
                f"mm_processor_kwargs: {unknown[0][:80]!r} cannot be set; expected {', '.join(known)}",
                param="mm_processor_kwargs",
            )
        geometry = _with_options(settings.geometry, options)
        rules = None
        if settings.videos is not None:
            rules = settings.videos.rules.with_options(*map(options.get, OF_VIDEOS))
        remote = [medium for medium in media if is_remote(medium.url)]
        for medium in remote:
            with numbered(medium):
                check_remote(medium.url, settings)
        if self._fetched is None or any(it.url not in self._fetched for it in remote):
            raise UnreadImages(remote)
        opened = [self._open(medium, geometry, rules) for medium in media]
        self._check_sizes(opened)
        return opened

    def _check_counts(self, media: Sequence[Medium]) -> None:
        settings, videos = self.settings, self.settings.videos
        num_videos = sum(medium.kind == "video" for medium in media)
        num_images = len(media) - num_videos
        if num_images > settings.max_images:
            raise BadRequestError(
                f"{num_images} images are more than {settings.max_images} (serve.images.max_images)",
                param="messages",
            )
        if num_videos and videos is None:
            raise BadRequestError(
                f"video 0: this server takes no videos: {settings.no_videos}; send frames as images",
                param="messages",
                code="unsupported_content_part",
            )
        if videos is not None and num_videos > videos.max_videos:
            raise BadRequestError(
                f"{num_videos} videos are more than {videos.max_videos} (serve.videos.max_videos)",
                param="messages",
            )

    def _check_sizes(self, opened: Sequence[OpenedImage | OpenedVideo]) -> None:
        settings = self.settings
        parts = [part for it in opened for part in it.parts]
        num_tokens, most = sum(part.num_tokens for part in parts), settings.max_request_tokens
        if most is not None and num_tokens > most:
            raise BadRequestError(
                f"the images and videos have {num_tokens} tokens, more than {most} (cache.image_tokens); send smaller "
                "or fewer images, lower mm_processor_kwargs.max_pixels, or for videos mm_processor_kwargs.fps",
                param="messages",
            )
        num_bytes = sum(part.num_bytes for part in parts)
        if num_bytes > settings.max_open_bytes:
            raise BadRequestError(
                f"the images and videos have {num_bytes} bytes of pixels, more than {settings.max_open_bytes} "
                "(serve.images.max_open_bytes)",
                param="messages",
            )

    def _open(
        self, medium: Medium, geometry: Geometry, rules: VideoRules | None
    ) -> OpenedImage | OpenedVideo:
        assert self._fetched is not None, "open has checked it"
        settings = self.settings
        pixels = settings.max_source_pixels
        if medium.kind == "image":
            with numbered(medium):
                data = read_source(medium, settings, self._fetched)
            return open_image(medium, data, geometry, pixels)
        assert rules is not None, "_check_counts has checked it"
        if is_list := medium.url[: len(FRAME_LIST)].lower() == FRAME_LIST:
            with numbered(medium):
                files = read_frames(medium, settings, rules.most_frames)
                source: FrameList | VideoFile = FrameList(files, pixels, rules.fps)
        else:
            with numbered(medium):
                source = VideoFile(read_source(medium, settings, self._fetched), pixels)
        return OpenedVideo.of(medium, source, rules, sampled=is_list)


def _with_options(geometry: Geometry, options: Mapping[str, Any]) -> Geometry:
    """Return the geometry with the limits of a request, in either spelling of transformers."""
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
