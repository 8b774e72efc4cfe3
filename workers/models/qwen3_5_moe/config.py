"""Reads config.json of Qwen3.5-MoE and Qwen3.6-MoE and maps their weights. Needs no torch; knows nothing of ranks.

A release has a vision tower, and the settings of the text part under `text_config`; `qwen3_5_moe_text` is the text part
alone.
"""

from functools import partial

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.gdn_reads import HYBRID_DEFAULTS, read_hybrid_layers
from workers.models.mtp.weights import qwen_names, with_mtp
from workers.models.vision import reads
from workers.models.vision.qwen_reads import with_qwen_vision
from workers.specs.model import ModelConfig

DEFAULTS = {**HYBRID_DEFAULTS, "mtp_num_hidden_layers": 1}
SECTIONS = (11, 11, 10)
ROOT = "model.language_model."
NAMES = WeightNames(root=ROOT)
# Text parts are also saved without the outer model. One replacement follows the other.
RENAMED = (
    (ROOT, "model."),
    *((f"model.{name}.", f"{ROOT}{name}.") for name in ("layers", "embed_tokens", "norm")),
)
MTP = qwen_names(NAMES)
text_part = partial(reads.text_part, whole="qwen3_5_moe")


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    layers, full, moe = read_hybrid_layers(read, norm_topk_prob=True)
    read.ignore(*reads.OF_IMAGES, *reads.OF_POSITIONS, reads.VISION)
    read.fixed("mlp_only_layers", [], None)
    # a head with an embedding of its own, which no release has, is skipped
    predicts = read.count("mtp_num_hidden_layers") > 0
    predicts &= not read.raw("mtp_use_dedicated_embeddings")
    config = read.finish(layers, moe, skipped=(MTP.root,), renamed=RENAMED, norm_offset=1.0)
    if predicts:
        config = with_mtp(config, full, MTP)
    return with_qwen_vision(config, read, SECTIONS)
