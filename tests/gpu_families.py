"""Small checkpoints of every family with the head sizes of releases, which kernels of GPUs are built for."""

from pathlib import Path
from typing import Any

from tests.checkpoints.families import fields_of, names_of, vision_of
from tests.checkpoints.writer import make_checkpoint

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "num_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DELTA_NETS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
GLM_LATENT = LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256}


def takes_latents(family: str) -> bool:
    """Return whether the family has latent attention."""
    return "kv_lora_rank" in fields_of(family)


def released_shape(path: Path, family: str, **changes: Any) -> Path:
    """Write a random checkpoint of the family to `path`."""
    sizes, names = SIZES, names_of(family)
    if names.get("head_dim", "head_dim") is None:  # it is hidden_size / num_heads there
        sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    if takes_latents(family):
        sizes = sizes | (GLM_LATENT if family == "glm4_moe_lite" else LATENT)
    if "linear_key_head_dim" in fields_of(family):
        sizes = sizes | DELTA_NETS
    return make_checkpoint(path, family=family, **sizes | changes)


def released_vision(path: Path, family: str) -> Path:
    """As `released_shape`, with a vision tower with the head size of releases."""
    of_text = {
        "glm4v_moe": {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        "qwen3_5_moe": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
            }
        },
        "qwen3_vl_moe": {"rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
    }[family]
    head_dim = 128 if family == "glm4v_moe" else 72
    tower = vision_of(family, SIZES["hidden_size"])["vision_config"]
    tower |= {"hidden_size": 4 * head_dim, "patch_size": 16, "image_size": 96}
    if family != "glm4v_moe":
        del tower["image_size"]
    return released_shape(path, family, vision=True, vision_config=tower, **of_text)
