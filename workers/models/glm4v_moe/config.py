"""Reads config.json of GLM-4.5V and GLM-4.6V and maps their weights. Needs no torch; knows nothing of ranks or devices.

The text part, under `text_config`, is GLM-4.5 with three positions a token.
"""

from functools import partial

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.glm4_moe import config as text
from workers.models.vision import reads
from workers.models.vision.glm_reads import with_glm_vision
from workers.specs.model import ModelConfig

DEFAULTS = {**text.DEFAULTS, "num_nextn_predict_layers": 0, "attention_bias": True}
SECTIONS = (8, 12, 12)
NAMES = WeightNames(root="model.language_model.", shared=text.NAMES.shared)
text_part = partial(reads.text_part, whole="glm4v_moe", ties=True)


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    read.ignore(*reads.OF_IMAGES, *reads.OF_POSITIONS, reads.VISION)
    return with_glm_vision(text.read_config(read, NAMES), read, SECTIONS)
