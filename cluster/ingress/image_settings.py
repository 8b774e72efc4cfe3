"""The images and videos that an ingress takes, from the configuration, the model and its image processor."""

from collections.abc import Mapping
from pathlib import Path

from cluster.api.images.geometry import Geometry
from cluster.api.images.settings import ImageSettings
from cluster.config.phalanx_config import PhalanxConfig
from cluster.ingress.video_settings import video_settings
from workers.images.limits import ImageLimits
from workers.models.config_reader import read_json
from workers.models.vision.reads import read_processor
from workers.specs.model import ModelConfig
from workers.specs.vision import GlmVisionSpec

_LEAST_OF_GLM = 12_544  # pixels, where a checkpoint of GLM has no limit; as transformers has them


def image_settings(config: PhalanxConfig, model: ModelConfig) -> ImageSettings | None:
    """Return the settings of images; None if the model takes text alone. Raises BadRequestError for wrong limits."""
    spec, serve, folder = model.vision, config.serve, config.model.folder
    if spec is None:
        return None
    length = config.model.max_model_len
    longest = model.max_position_embeddings if length == "auto" else length
    limits = ImageLimits.within(longest, config.scheduler, config.cache, spec)
    processor = read_processor(Path(folder))
    given = processor.get("size")
    size = given if isinstance(given, Mapping) else {}
    most, rank_tokens = spec.most_pixels, spec.largest
    if config.scheduler.max_image_tokens != "auto":
        most, rank_tokens = min(most, limits.image * spec.token_pixels), limits.image
    resample = processor.get("resample")
    default = _LEAST_OF_GLM if isinstance(spec, GlmVisionSpec) else Geometry.min_pixels
    least = processor.get("min_pixels") or size.get("shortest_edge") or default
    geometry = Geometry(
        patch_size=spec.patch_size,
        merge_size=spec.merge_size,
        frames=spec.temporal_patch_size,
        min_pixels=min(least, most),
        max_pixels=most,
        counts_frames=spec.counted_frames > 1,
        resample=Geometry.resample if resample is None else resample,
        rank_tokens=rank_tokens,
    )
    videos = video_settings(config, spec, limits)
    return ImageSettings(
        token_id=read_json(Path(folder), "config.json", required=True)["image_token_id"],
        geometry=geometry.within(serve.images.min_pixels, serve.images.max_pixels),
        allowed_domains=tuple(serve.allowed_media_domains),
        allowed_folder=serve.allowed_media_folder,
        max_request_tokens=limits.cache,
        videos=None if isinstance(videos, str) else videos,
        no_videos=videos if isinstance(videos, str) else "",
        **serve.images.model_dump(exclude={"min_pixels", "max_pixels"}),
    )
