"""Reads the vision tower of GLM-4.5V from config.json. Needs no torch."""

from workers.models.config_reader import ConfigReader
from workers.models.vision.reads import VISION, VisionReader, with_sections, without_vision
from workers.specs.model import ModelConfig
from workers.specs.vision import GlmVisionSpec

DEFAULTS = {  # as transformers has them
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
MOST_PIXELS = 28 * 28 * 15_000
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def with_glm_vision(
    config: ModelConfig, whole: ConfigReader, sections: tuple[int, int, int]
) -> ModelConfig:
    """Return the config with the tower of `vision_config`, if it is there, and three positions a token.

    sections   pairs that turn by each position, if config.json has none
    """
    if whole.raw(VISION) is None:
        return without_vision(config)
    config = with_sections(config, whole, sections, interleaved=False)
    vision = VisionReader(whole, DEFAULTS)
    read = vision.read
    read.ignore("attention_dropout")
    spec = GlmVisionSpec(
        **vision.sizes(MOST_PIXELS),
        grid_side=max(1, read.integer("image_size") // read.integer("patch_size")),
        norm_eps=read.number("rms_norm_eps"),
        qkv_bias=read.boolean("attention_bias"),
        scale=vision.scale(CLIP_MEAN, CLIP_STD),
    )
    return vision.finish(config, spec)
