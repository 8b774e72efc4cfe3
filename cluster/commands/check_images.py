"""`phalanx check`: the images and videos that requests may have, and what a rank does with them, in words."""

from cluster.api.videos.source import is_installed
from cluster.config.phalanx_config import PhalanxConfig
from cluster.ingress.image_settings import image_settings
from workers.config import RankConfig
from workers.images.limits import ImageLimits
from workers.images.step_share import DECODE_SHARE, FIRST_TOKENS
from workers.specs.model import ModelConfig


def images_line(config: PhalanxConfig, rank_config: RankConfig, model: ModelConfig) -> str:
    """Return which images requests may have, where they may come from, and what a rank computes and keeps of them."""
    found = image_settings(config, model)
    if found is None or model.vision is None:
        return _none(config, model)
    geometry, limits = found.geometry, ImageLimits.of(rank_config, model.vision)
    unit = (geometry.patch_size * geometry.merge_size) ** 2
    most = geometry.max_pixels // model.vision.token_pixels
    origins = ["data URLs"]
    if found.allowed_domains:
        origins.append(f"http(s) URLs of {', '.join(found.allowed_domains)}")
    if found.allowed_folder is not None:
        origins.append(f"files below {found.allowed_folder}")
    beside = f"{DECODE_SHARE} of a step's time beside it, or {FIRST_TOKENS} tokens on a CPU"
    if limits.per_step is not None:
        beside = f"{limits.per_step:,} tokens beside a step"
    return (
        f"up to {found.max_images} a request, each of at most {most} tokens ({unit} pixels a token); "
        f"from {', '.join(origins)}; {beside}, embeddings of {limits.cache:,} are kept"
    )


def videos_line(config: PhalanxConfig, model: ModelConfig) -> str:
    """Return which videos requests may have, and in which forms."""
    found = image_settings(config, model)
    if found is None:
        return _none(config, model)
    videos = found.videos
    if videos is None:
        return f"none: {found.no_videos}"
    rules = videos.rules
    tokens = rules.max_pixels // (rules.per_token * rules.unit**2)
    files = "files and lists of frames"
    if not is_installed():
        files = "lists of frames; files need PyAV (pip install 'phalanx[video]')"
    return (
        f"up to {videos.max_videos} a request, each of at most {rules.most_frames} frames and {tokens} tokens; "
        f"{files}"
    )


def _none(config: PhalanxConfig, model: ModelConfig) -> str:
    left_out = config.model.language_model_only and bool(model.skipped_parts)
    return "none: " + (
        "model.language_model_only leaves the vision tower out"
        if left_out
        else "the model takes text alone"
    )
