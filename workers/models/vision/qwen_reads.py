"""Reads the vision tower of Qwen3-VL, Qwen3.5 and Qwen3.6 from config.json. Needs no torch."""

from math import isqrt

from workers.models.config_reader import ConfigReader
from workers.models.vision.reads import VISION, VisionReader, with_sections, without_vision
from workers.specs.model import ModelConfig
from workers.specs.vision import QwenVisionSpec

DEFAULTS = {  # as transformers has them
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
HALF = (0.5, 0.5, 0.5)
MOST_PIXELS = 2**24


def with_qwen_vision(
    config: ModelConfig,
    whole: ConfigReader,
    sections: tuple[int, int, int],
    deepstack: tuple[int, ...] = (),
) -> ModelConfig:
    """Return the config with the tower of `vision_config`, if it is there, and three positions a token.

    sections    pairs that turn by each position, if config.json has none
    deepstack   blocks with outputs of their own, if `vision_config` has none
    """
    if whole.raw(VISION) is None:
        return without_vision(config)
    config = with_sections(config, whole, sections, interleaved=True)
    vision = VisionReader(whole, DEFAULTS)
    read = vision.read
    positions, deepstack = read.integer("num_position_embeddings"), _deepstack(read, deepstack)
    side = isqrt(positions)
    if side**2 != positions:
        read.problems.append(f"num_position_embeddings is {positions}; expected a square number")
    spec = QwenVisionSpec(
        **vision.sizes(MOST_PIXELS),
        grid_side=side,
        norm_eps=1e-6,
        deepstack=deepstack,
        scale=vision.scale(HALF, HALF),
    )
    if len(deepstack) > config.num_layers:
        read.problems.append(
            f"deepstack_visual_indexes has {len(deepstack)} blocks; expected at most one a layer of the text part "
            f"({config.num_layers})"
        )
    return vision.finish(config, spec)


def _deepstack(read: ConfigReader, default: tuple[int, ...]) -> tuple[int, ...]:
    key, depth = "deepstack_visual_indexes", read.integer("depth")
    blocks = default if read.raw(key) is None else read.integers(key)
    if len(set(blocks)) < len(blocks) or any(block >= depth for block in blocks):
        read.problems.append(
            f"deepstack_visual_indexes is {list(blocks)}; expected different blocks below depth ({depth})"
        )
    return blocks
