"""Finds settings of images that cannot work with each other, or with the model."""

from collections.abc import Iterator
from pathlib import Path

from cluster.config.errors import Problem
from cluster.config.phalanx_config import PhalanxConfig
from workers.models.vision.reads import read_video_processor
from workers.specs.model import ModelConfig


def check_images(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """Yield the problems of serve.images, serve.videos and of the places of images and videos."""
    serve, images = config.serve, config.serve.images
    folder = serve.allowed_media_folder
    if folder is not None and not Path(folder).is_dir():
        yield Problem("serve.allowed_media_folder", f"there is no folder {folder!r}")
    least, most = images.min_pixels, images.max_pixels
    if least is not None and most is not None and least > most:
        yield Problem(
            "serve.images.min_pixels",
            f"{least} is more than serve.images.max_pixels = {most}",
            ("serve.images.max_pixels",),
        )
    spec = None if model is None else model.vision
    if spec is None:
        return
    tokens = config.scheduler.max_image_tokens
    limit, reason, place = spec.most_pixels, "of the checkpoint's processor", "model.path"
    if tokens != "auto" and int(tokens) * spec.token_pixels < limit:
        limit, place = int(tokens) * spec.token_pixels, "scheduler.max_image_tokens"
        reason = f"of {place} = {tokens}"
    for name in ("min_pixels", "max_pixels"):
        value = getattr(images, name)
        if value is not None and value > limit:
            yield Problem(
                f"serve.images.{name}", f"{value} is more than the {limit} {reason}", (place,)
            )
    given, value = (
        read_video_processor(Path(config.model.folder)).get("size"),
        serve.videos.max_pixels,
    )
    of_videos = given.get("longest_edge") if isinstance(given, dict) else None
    if value is not None and of_videos is not None and value > of_videos:
        yield Problem(
            "serve.videos.max_pixels",
            f"{value} is more than the {of_videos} of the checkpoint's video processor",
            ("model.path",),
        )
    uploads = serve.limits.max_upload_bytes
    if uploads < images.max_body_bytes:
        yield Problem(
            "serve.limits.max_upload_bytes",
            f"{uploads} bytes of all bodies hold no body of serve.images.max_body_bytes = {images.max_body_bytes}; "
            "raise the first or lower the second",
            ("serve.images.max_body_bytes",),
        )
