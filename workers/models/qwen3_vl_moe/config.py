"""Reads config.json of Qwen3-VL-MoE and maps its weights. Needs no torch; knows nothing of ranks or devices.

The text part, under `text_config`, is Qwen3-MoE with three positions a token.
"""

from functools import partial

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.qwen3_moe import config as text
from workers.models.vision import reads
from workers.models.vision.qwen_reads import with_qwen_vision
from workers.specs.model import ModelConfig

DEFAULTS = {**text.DEFAULTS, "norm_topk_prob": True}
SECTIONS = (24, 20, 20)
DEEPSTACK = (8, 16, 24)
NAMES = WeightNames(root="model.language_model.")
text_part = partial(reads.text_part, whole="qwen3_vl_moe")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    read.ignore(*reads.OF_IMAGES, *reads.OF_POSITIONS, reads.VISION)
    read.fixed("norm_topk_prob", True, None)
    return with_qwen_vision(text.read_config(read), read, SECTIONS, DEEPSTACK)
