"""Reads config.json of EAGLE-3 draft models, in both published forms, and compares it with the target. Needs no torch.

EAGLE's own releases have the settings of a Llama model of one layer; the speculators library nests them.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.hub import INDEX_FILE, SINGLE_FILE
from workers.models.config_reader import ConfigReader, ModelConfigError, read_json
from workers.models.eagle3.spec import Eagle3AttentionSpec, Eagle3Config
from workers.models.eagle3.weights import RENAMED, SKIPPED, Eagle3Names
from workers.specs.model import LayerSpec, MlpSpec, ModelConfig
from workers.specs.weight_map import mapped_name

ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    *("Eagle3Speculator", "Eagle3DraftModel"),
)
KEY = "speculation.draft_model"
LAYER_CONFIG = "transformer_layer_config"  # of the speculators library
LAYER_TYPE = f"{LAYER_CONFIG}.model_type"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
DEFAULTS = {
    "num_hidden_layers": 1,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
# Values of `eagle_config` that draft models here have.
EAGLE_CONFIG: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
}
# Of training, of other methods of the same library, and of a target with experts.
IGNORED = (
    "decoder_sparse_step",
    *("embed_requires_grad", "enable_sp_ulysses", "pretraining_tp", "sliding_window"),
    *("max_window_layers", "speculators_config", "speculators_version", "ttt_steps"),
)


def load_eagle3_config(
    path: str | Path, target: ModelConfig, tensors: Collection[str] | None = None
) -> Eagle3Config:
    """Return the config of the draft model in a folder; ModelConfigError names everything that is wrong.

    tensors   names of the tensors of the checkpoint; None: it has all that it may have
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelConfigError(
            f"{KEY}: {folder} is not a folder; expected the folder of an EAGLE-3 draft model on this machine, because "
            "draft models are not fetched from the Hugging Face Hub"
        )
    try:
        raw = read_json(folder, "config.json", required=True)
    except ModelConfigError as error:
        raise ModelConfigError(f"{KEY}: {error}") from None
    if tensors is not None and not tensors:
        raise ModelConfigError(
            f"{KEY}: {folder} has no weights: no {SINGLE_FILE} and no {INDEX_FILE} there can be read"
        )
    return parse_eagle3_config(raw, target, tensors, str(folder / "config.json"))


def parse_eagle3_config(
    raw: Mapping[str, Any], target: ModelConfig, tensors: Collection[str] | None, where: str
) -> Eagle3Config:
    """Return the config of a config.json; `where` begins its errors."""
    where = f"{KEY}: {where}"
    architectures = raw.get("architectures")
    known = isinstance(architectures, list) and all(it in ARCHITECTURES for it in architectures)
    if not architectures or not known:
        raise ModelConfigError(
            f"{where}: architectures is {architectures!r}; supported: one of {list(ARCHITECTURES)}"
        )
    flat = _flat(raw)
    read = ConfigReader(flat, DEFAULTS, {}, lambda config: iter(()))
    config = _read(read, flat, target, tensors)
    if read.problems:
        raise ModelConfigError(f"{where}: " + "; ".join(read.problems))
    return config


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of the layer and of EAGLE in one level; both keep the names of their keys."""
    nested = raw.get(LAYER_CONFIG)
    layer = nested if isinstance(nested, Mapping) else {}
    flat = {**layer, **raw, LAYER_TYPE: layer.get("model_type")}
    flat.pop(LAYER_CONFIG, None)
    eagle = flat.get("eagle_config")
    if isinstance(eagle, Mapping):
        del flat["eagle_config"]
        flat |= {key: value for key, value in eagle.items() if key != AUX_LAYERS}
        ids = eagle.get(AUX_LAYERS)
        if isinstance(ids, list) and all(isinstance(layer, int) for layer in ids):
            # here a layer's number means its output, elsewhere its input
            flat[AUX_LAYERS] = [layer + 1 for layer in ids]
    return flat


def _read(
    read: ConfigReader,
    flat: Mapping[str, Any],
    target: ModelConfig,
    tensors: Collection[str] | None,
) -> Eagle3Config:
    vocab_size, dim = read.integer("vocab_size"), read.integer("hidden_size")
    draft_vocab_size = read.integer_or("draft_vocab_size", vocab_size)
    target_dim = read.integer_or("target_hidden_size", dim)
    aux_layers = _read_aux_layers(read, target)
    stored = None if tensors is None else {mapped_name(name, RENAMED) for name in tensors}
    own_embedding = stored is None or "embed_tokens.weight" in stored
    own_head = stored is None or "lm_head.weight" in stored
    eagle: dict[str, Any] = {
        "target_dim": target_dim,
        "draft_vocab_size": draft_vocab_size,
        "own_embedding": own_embedding,
        "own_head": own_head,
        # SpecForge stores the map of a whole vocabulary too
        "maps_tokens": draft_vocab_size < vocab_size or (stored is not None and "d2t" in stored),
        "norm_before_fc": read.boolean("norm_before_fc"),
        "fc_norm": read.boolean("fc_norm"),
    }
    if eagle["norm_before_fc"] and eagle["fc_norm"]:
        read.problems.append("norm_before_fc and fc_norm are true; expected one of them at most")
    layer = LayerSpec(attention=_read_attention(read, dim), mlp=_read_mlp(read))
    for key, values in EAGLE_CONFIG.items():
        read.fixed(key, *values)
    read.fixed("num_hidden_layers", 1)
    read.fixed("target_vocab_size", vocab_size, None)
    read.fixed("speculators_model_type", "eagle3", None)
    read.fixed("num_aux_hidden_states", len(aux_layers), None)
    for key in ("use_sliding_window", "bias", "mlp_bias"):
        read.fixed(key, False, None)
    read.ignore(*IGNORED)
    norm_output = read.boolean("norm_output")
    _check_target(read, target, vocab_size, target_dim, draft_vocab_size)
    shared = [
        name for name, own in (("embed_tokens", own_embedding), ("lm_head", own_head)) if not own
    ]
    if shared and dim != target.hidden_size:
        read.problems.append(
            f"hidden_size is {dim}; without {' and '.join(shared)} of its own it must be that of the model "
            f"({target.hidden_size})"
        )
    if not own_head and draft_vocab_size < vocab_size:
        read.problems.append(
            f"draft_vocab_size is {draft_vocab_size}, but the checkpoint has no lm_head.weight; "
            f"expected that of vocab_size ({vocab_size})"
        )
    config = read.finish((layer,), target.moe, skipped=SKIPPED, renamed=RENAMED)
    names = Eagle3Names(num_aux=len(aux_layers), **eagle)
    return Eagle3Config(
        model=replace(config, weight_entries=names),
        aux_layers=aux_layers,
        norm_output=norm_output,
        **eagle,
    )


def _read_attention(read: ConfigReader, dim: int) -> Eagle3AttentionSpec:
    heads, bias = read.integer("num_attention_heads"), read.boolean("attention_bias")
    read.fixed(LAYER_TYPE, "llama", "qwen3", None)
    return Eagle3AttentionSpec(
        num_heads=heads,
        num_kv_heads=read.integer_or("num_key_value_heads", heads),
        head_dim=read.integer_or("head_dim", max(1, dim // heads)),
        rope=read.rope(),
        qk_norm="head" if read.raw(LAYER_TYPE) == "qwen3" else None,
        qkv_bias=bias,
        output_bias=bias,
        norm_before_residual=read.boolean("norm_before_residual"),
    )


def _read_mlp(read: ConfigReader) -> MlpSpec:
    return MlpSpec(
        intermediate_size=read.integer("intermediate_size"), activation=read.activation()
    )


def _read_aux_layers(read: ConfigReader, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers of the target by their outputs; config.json counts by inputs, as EAGLE's authors do."""
    count = target.num_layers
    inputs = read.integers(AUX_LAYERS) or (2, count // 2, count - 3)
    if min(inputs) < 1 or max(inputs) > count or len(set(inputs)) < len(inputs):
        read.problems.append(
            f"{AUX_LAYERS} means the inputs of layers {list(inputs)}; "
            f"expected different ones from 1 to {count}, the number of layers of the model"
        )
    return tuple(sorted(layer - 1 for layer in inputs))


def _check_target(
    read: ConfigReader,
    target: ModelConfig,
    vocab_size: int,
    target_dim: int,
    draft_vocab_size: int,
) -> None:
    """Complain if the draft model was trained for a model of other sizes."""
    if vocab_size != target.vocab_size:
        read.problems.append(
            f"vocab_size is {vocab_size}; expected that of the model ({target.vocab_size})"
        )
    if target_dim != target.hidden_size:
        key = "target_hidden_size" if read.raw("target_hidden_size") else "hidden_size"
        read.problems.append(
            f"{key} is {target_dim}; expected the hidden_size of the model ({target.hidden_size})"
        )
    if draft_vocab_size > vocab_size:
        read.problems.append(
            f"draft_vocab_size is {draft_vocab_size}; expected at most vocab_size ({vocab_size})"
        )
