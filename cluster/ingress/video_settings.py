"""The videos that an ingress takes, from the configuration, the model and its video processor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.api.videos.rules import Style, VideoRules
from cluster.api.videos.settings import VideoSettings
from cluster.config.phalanx_config import PhalanxConfig
from workers.images.limits import ImageLimits
from workers.models.config_reader import read_json
from workers.models.vision.reads import per_channel, read_video_processor
from workers.specs.vision import GlmVisionSpec, VisionSpec

_STYLES: dict[str, Style] = {
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "Glm4vVideoProcessor": "glm4v",
    "Glm46VVideoProcessor": "glm46v",
}
# Pixels of all frames of a video, the fewest and the most, where a checkpoint has none; as transformers has them.
_PIXELS: dict[Style, tuple[int, int]] = {
    "qwen3_vl": (131_072, 786_432),
    "glm4v": (12_544, 47_040_000),
    "glm46v": (12_544, 47_040_000),
}
_OF_SAMPLING = ("fps", "num_frames", "min_frames", "max_frames", "max_duration", "resample")


def video_settings(
    config: PhalanxConfig, spec: VisionSpec, limits: ImageLimits
) -> VideoSettings | str:
    """Return the settings of videos, or why there are none."""
    folder, videos = Path(config.model.folder), config.serve.videos
    processor = read_video_processor(folder)
    style = _STYLES.get(str(_kind_of(processor, spec)))
    if style is None:
        return f"its processor {_kind_of(processor, spec)!r} is not known here"
    if processor.get("do_sample_frames") is False:
        return "its processor takes all frames (do_sample_frames)"
    for key, own in (("image_mean", spec.scale.mean), ("image_std", spec.scale.std)):
        found = processor.get(key)
        if found is not None and per_channel(found, len(own)) != own:
            return f"its processor scales frames otherwise than images ({key})"
    # The frames of GLM are images of the prompt in all respects.
    name = "image_token_id" if isinstance(spec, GlmVisionSpec) else "video_token_id"
    token_id = read_json(folder, "config.json", required=True).get(name)
    if token_id is None:
        return f"config.json has no {name}"
    given = processor.get("size")
    size = given if isinstance(given, Mapping) else {}
    least, most = _PIXELS[style]
    most = min(size.get("longest_edge") or most, videos.max_pixels or 2**63)
    rules = VideoRules(
        style=style,
        patch_size=spec.patch_size,
        merge_size=spec.merge_size,
        per_token=spec.temporal_patch_size,
        min_pixels=min(size.get("shortest_edge") or least, most),
        max_pixels=most,
        frame_tokens=_frame_tokens(processor),
        rank_tokens=limits.image,
        most_frames=videos.max_frames,
        **{key: processor[key] for key in _OF_SAMPLING if processor.get(key) is not None},
    )
    return VideoSettings(
        token_id=token_id,
        rules=rules,
        max_videos=videos.max_videos,
        max_video_bytes=videos.max_video_bytes,
    )


def _kind_of(processor: Mapping[str, Any], spec: VisionSpec) -> Any:
    """Return transformers' class of a video processor.

    A checkpoint without one has that of the same name as its image processor, or of the family.
    """
    family = "Glm4vVideoProcessor" if isinstance(spec, GlmVisionSpec) else "Qwen3VLVideoProcessor"
    of_images = str(processor.get("image_processor_type"))
    same = of_images.replace("ImageProcessor", "VideoProcessor")
    return processor.get("video_processor_type") or (same if same in _STYLES else family)


def _frame_tokens(processor: Mapping[str, Any]) -> int | None:
    capped = processor.get("cap_pixels_per_frame")
    return int(processor.get("max_video_tokens") or 768) if capped else None
