"""Reads config.json of Qwen3-Next and maps its weights. Needs no torch; knows nothing of ranks or devices."""

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.gdn_reads import HYBRID_DEFAULTS, read_hybrid_layers
from workers.models.mtp.weights import qwen_names, with_mtp
from workers.specs.model import MlpSpec, ModelConfig

DEFAULTS = {**HYBRID_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True}
NAMES = WeightNames(joined_delta_inputs=True)
MTP = qwen_names(NAMES)


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    dense = MlpSpec(
        intermediate_size=read.integer("intermediate_size"), activation=read.activation()
    )
    norm_topk_prob = read.boolean("norm_topk_prob")
    layers, full, moe = read_hybrid_layers(read, norm_topk_prob=norm_topk_prob, dense=dense)
    config = read.finish(layers, moe, skipped=(MTP.root,), norm_offset=1.0)
    return with_mtp(config, full, MTP)
