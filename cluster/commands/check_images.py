"""`phalanx check`: the images that requests may have, and what a rank does with them, in words."""

from cluster.config.phalanx_config import PhalanxConfig
from cluster.ingress.image_settings import image_settings
from workers.config import RankConfig
from workers.images.limits import ImageLimits
from workers.specs.model import ModelConfig


def images_line(config: PhalanxConfig, rank_config: RankConfig, model: ModelConfig) -> str:
    """Return which images requests may have, where they may come from, and what a rank computes and keeps of them."""
    found = image_settings(config, model)
    if found is None or model.vision is None:
        left_out = config.model.language_model_only and bool(model.skipped_parts)
        return "none: " + (
            "model.language_model_only leaves the vision tower out"
            if left_out
            else "the model takes text alone"
        )
    geometry, limits = found.geometry, ImageLimits.of(rank_config, model.vision)
    unit = (geometry.patch_size * geometry.merge_size) ** 2
    frames = geometry.frames if geometry.counts_frames else 1
    most = geometry.max_pixels // (unit * frames)
    origins = ["data URLs"]
    if found.allowed_domains:
        origins.append(f"http(s) URLs of {', '.join(found.allowed_domains)}")
    if found.allowed_folder is not None:
        origins.append(f"files below {found.allowed_folder}")
    return (
        f"up to {found.max_images} a request, each of at most {most} tokens ({unit} pixels a token); "
        f"from {', '.join(origins)}; {limits.per_step:,} tokens beside a step, embeddings of {limits.cache:,} are kept"
    )
