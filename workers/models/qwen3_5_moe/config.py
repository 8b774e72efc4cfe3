"""Reads config.json of Qwen3.5-MoE and Qwen3.6-MoE and maps their weights. Needs no torch; knows nothing of ranks.

A release has a vision tower, and the settings of the text part under `text_config`; `qwen3_5_moe_text` is the text part
alone. Images are not served: all tokens are text, at which the three positions of its rotary embedding are equal.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.models.config_reader import ConfigReader
from workers.models.decoder_weights import WeightNames
from workers.models.gdn_reads import HYBRID_DEFAULTS, read_hybrid_layers
from workers.models.mtp.weights import qwen_names, with_mtp
from workers.specs.model import ModelConfig

DEFAULTS = {**HYBRID_DEFAULTS, "mtp_num_hidden_layers": 1}
WHOLE = "qwen3_5_moe"  # with a vision tower
TEXT = "text_config"
VISION = "vision_config"
OF_IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
OF_POSITIONS = ("mrope_section", "mrope_interleaved")
ROOT = "model.language_model."
NAMES = WeightNames(root=ROOT)
# Text parts are also saved without the outer model. One replacement follows the other.
RENAMED = (
    (ROOT, "model."),
    *((f"model.{name}.", f"{ROOT}{name}.") for name in ("layers", "embed_tokens", "norm")),
)
MTP = qwen_names(NAMES)
SKIPPED = (MTP.root, "model.visual.")


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the settings of the text part in the place of `text_config`."""
    found = dict(raw)
    if raw.get("model_type") == WHOLE and isinstance(raw.get(TEXT), Mapping):
        found = {**raw[TEXT], **found}
        del found[TEXT]
        for key in ("dtype", "torch_dtype", "eos_token_id"):
            if raw.get(key) is None and raw[TEXT].get(key) is not None:
                found[key] = raw[TEXT][key]
    rope = found.get("rope_parameters")
    if isinstance(rope, Mapping):
        found["rope_parameters"] = {k: v for k, v in rope.items() if k not in OF_POSITIONS}
    return found


def read_config(read: ConfigReader) -> ModelConfig:
    """Return the config; `read.problems` names what is wrong with it."""
    layers, full, moe = read_hybrid_layers(read, norm_topk_prob=True)
    read.ignore(*OF_IMAGES)
    read.fixed("mlp_only_layers", [], None)
    vision = read.raw(VISION) is not None
    # a head with an embedding of its own, which no release has, is skipped
    predicts = read.count("mtp_num_hidden_layers") > 0
    predicts &= not read.raw("mtp_use_dedicated_embeddings")
    config = read.finish(layers, moe, skipped=SKIPPED, renamed=RENAMED, norm_offset=1.0)
    if vision:
        config = replace(config, skipped_parts=("the vision tower",))
    return with_mtp(config, full, MTP) if predicts else config
