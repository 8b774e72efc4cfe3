"""Writes a small random checkpoint by transformers, with a byte-level tokenizer, offline.

python -m scripts.make_checkpoint FOLDER --family qwen3_moe --set num_hidden_layers=2
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from scripts.byte_tokenizer import (
    END_OF_TEXT,
    IM_END,
    SPECIAL_TOKENS,
    byte_tokenizer,
    generation_config,
    save_tokenizer,
)
from workers.models.registry import DEFAULT_FAMILY, FAMILIES, parse_model_config
from workers.weights.initial_weights import NUM_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Fields of config.json that are set where the family has them; all else is as in transformers.
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 16
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 4),
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SMALL_LATENT = {name: size for name, size in SMALL.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def make_checkpoint(
    path: str | Path,
    *,
    family: str = DEFAULT_FAMILY,
    weights: bool = True,
    seed: int = 0,
    overwrite: bool = False,
    **fields: Any,
) -> Path:
    """Write a random checkpoint of a model family to `path` and return the folder.

    `fields` go into config.json under the family's own names; sizes that are absent there are small. Without `weights`
    the folder is one for `model.weights: dummy`. A folder that is not empty is refused unless `overwrite`. Raises
    ValueError for a family or fields that this server does not support.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = Path(path)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"{folder} is not empty; --overwrite replaces a checkpoint there")
    config = _config_of(family, fields)
    model_config = parse_model_config(config.to_dict(), {}, "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    config.save_pretrained(folder)
    if weights:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        # Small logits beyond the bytes: else a random model ends by chance, or writes ids that decode to nothing.
        model.get_output_embeddings().weight.data[NUM_BYTES:] *= 0.05
        model.save_pretrained(folder)
    ends = generation_config(list(range(NUM_BYTES, NUM_BYTES + len(SPECIAL_TOKENS))))
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", "utf-8")
    save_tokenizer(folder, byte_tokenizer(), model_config.max_position_embeddings)
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default=DEFAULT_FAMILY, help="model_type of config.json")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="field of config.json"
    )
    parser.add_argument(
        "--no-weights", action="store_true", help="only what model.weights: dummy needs"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    fields = dict(field.partition("=")[::2] for field in args.set)
    try:
        make_checkpoint(
            args.folder,
            family=args.family,
            weights=not args.no_weights,
            seed=args.seed,
            overwrite=args.overwrite,
            **{name: yaml.safe_load(value) for name, value in fields.items()},
        )
    except ValueError as error:
        parser.error(str(error))


def _config_of(family: str, fields: dict[str, Any]) -> "PretrainedConfig":
    """Return the configuration of a small model of `family` with `fields`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if family not in FAMILIES or family not in CONFIG_MAPPING:
        known = ", ".join(name for name in FAMILIES if name in CONFIG_MAPPING)
        raise ValueError(f"family: {family!r} is none of {known}, which transformers has")
    defaults = AutoConfig.for_model(family)
    if hasattr(defaults, "text_config"):
        part = f"{family}_text"
        known = f"; its part is {part}" if part in FAMILIES else ""
        raise ValueError(f"family: {family} is more than a language model{known}")
    small = SMALL_LATENT if hasattr(defaults, "kv_lora_rank") else SMALL
    # transformers has several names for one field.
    sizes = {
        defaults.attribute_map.get(name, name): value
        for name, value in (*small.items(), *fields.items())
        if name in fields or hasattr(defaults, name)
    }
    tokens = {
        "bos_token_id": None,
        "eos_token_id": NUM_BYTES + SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": NUM_BYTES + SPECIAL_TOKENS.index(END_OF_TEXT),
    }
    config = AutoConfig.for_model(family, **{"dtype": "float32", **tokens, **sizes})
    config.architectures = [FAMILIES[family].architecture]
    return config


if __name__ == "__main__":
    main()
