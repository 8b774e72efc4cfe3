"""Write small random checkpoints in the Hugging Face disk form, offline.

`make_checkpoint` writes config.json, safetensors, a byte-level tokenizer with a ChatML template, and
generation_config.json. It knows nothing of how a rank loads them. Weights depend on (seed, tensor name) alone, so the
number of shards and the layout of experts change no value.
"""

import json
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.models.checkpoint_weights import ExpertLayout, checkpoint_tensors, write_weights
from workers.models.registry import DEFAULT_FAMILY, FAMILIES, parse_model_config
from workers.weights.initial_weights import NUM_BYTES

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

# ChatML with calls in the Hermes form. The tools and the client's system message share one turn.
CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0]['role'] == 'system' -%}
    {{- text(messages[0]['content']) + '\n\n' -}}
    {%- set messages = messages[1:] -%}
  {%- endif -%}
  {{- '# Tools\n\nOne function a line, as JSON:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\n\nTo call a function, write:\n<tool_call>\n' -}}
  {{- '{"name": "its name", "arguments": {its arguments}}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\n' -}}
  {%- if message['role'] == 'tool' -%}
    {{- '<tool_response>\n' + text(message['content']) + '\n</tool_response>' -}}
  {%- else -%}
    {{- text(message['content']) -}}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n' if message['content'] or not loop.first -}}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {%- if call.function.arguments is string -%}
      {{- call.function.arguments -}}
    {%- else -%}
      {{- call.function.arguments | tojson -}}
    {%- endif -%}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()

# config.json's names of fields that are parameters of `make_checkpoint` under other names.
_RENAMED = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "torch_dtype": "dtype",
}
_TOKENS = {
    "bos_token_id": None,
    "eos_token_id": NUM_BYTES + SPECIAL_TOKENS.index(IM_END),
    "pad_token_id": NUM_BYTES + SPECIAL_TOKENS.index(END_OF_TEXT),
}
Quantization = Literal[
    "fp8", "fp8-tensor", "compressed-tensor", "compressed-channel", "compressed-block", "mxfp4"
]
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    # Releases keep a and b of delta nets in 16 bits.
    "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"],
}

_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def _compressed(strategy: str) -> dict[str, Any]:
    """Return the `quantization_config` that llm-compressor writes."""
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks = [128, 128] if strategy == "block" else None
    weights = values | {"strategy": strategy, "dynamic": False, "block_structure": blocks}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": values | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


QUANTIZATIONS: dict[Quantization, dict[str, Any]] = {
    "fp8": _FP8 | {"fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8-tensor": _FP8,
    "compressed-tensor": _compressed("tensor"),
    "compressed-channel": _compressed("channel"),
    "compressed-block": _compressed("block"),
    "mxfp4": _MXFP4,
}


def make_checkpoint(
    path: str | Path,
    *,
    family: str = DEFAULT_FAMILY,
    num_layers: int = 4,
    hidden_size: int = 128,
    num_experts: int = 16,
    num_experts_per_tok: int = 4,
    moe_intermediate_size: int = 64,
    intermediate_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int = 512,
    max_position_embeddings: int = 4096,
    dtype: str = "float32",
    num_shards: int = 1,
    seed: int = 0,
    tie_word_embeddings: bool = False,
    overwrite: bool = False,
    weights: bool = True,
    fp8: bool = False,
    quantization: Quantization | None = None,
    expert_layout: ExpertLayout | None = None,
    **config_fields: Any,
) -> Path:
    """Write a random checkpoint of a model family to `path` and return the folder.

    `moe_intermediate_size` is the width of an expert, `intermediate_size` the width of the dense MLP of layers without
    experts; None, as of `head_dim` and `num_kv_heads`: the family's own. `config_fields` go into config.json as they
    are, e.g. `attention_bias=True`, `norm_topk_prob=False`, `rope_theta=1e4`, `rope_scaling={...}`.
    `quantization`: projections are stored in this form ("mxfp4": gpt-oss's experts), all else in `dtype`; `fp8`: "fp8".
    `expert_layout`: None is that of the family's releases.
    Without `weights` the folder is one for `model.weights: dummy`. A non-empty folder is refused unless
    `overwrite`. Impossible values raise ValueError by name.
    """
    _refuse_renamed(config_fields)
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_intermediate_size": moe_intermediate_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or _kv_heads(family, num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
    }
    _validate(sizes | {"num_shards": num_shards})
    config = _family_fields(family, sizes)
    config |= {"dtype": dtype, "tie_word_embeddings": tie_word_embeddings, **_TOKENS}
    if "rope_parameters" not in config_fields:
        config["rope_theta"] = 1_000_000.0
    if fp8 or quantization:
        config["quantization_config"] = QUANTIZATIONS[quantization or "fp8"]
    config |= config_fields
    shards, layout = num_shards if weights else 0, expert_layout or released_layout(family)
    return _write(Path(path), config, shards, seed, overwrite, layout)


def released_layout(family: str) -> ExpertLayout:
    """Return how releases of the family store experts."""
    layout: ExpertLayout = getattr(FAMILIES[family].config, "EXPERT_LAYOUT", "apart")
    return layout


def _family_fields(family: str, sizes: dict[str, int | None]) -> dict[str, Any]:
    """Return the family's fields of config.json and the given sizes under the family's names."""
    if family not in FAMILIES:
        raise ValueError(f"family: {family!r} is none of {', '.join(FAMILIES)}")
    module = FAMILIES[family].config
    fields = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "hidden_act": "silu",
        **module.CHECKPOINT_FIELDS,
    }
    for name, size in sizes.items():
        key = module.CHECKPOINT_NAMES.get(name, name)
        if size is not None and key is None:
            raise ValueError(f"{name}: {family} has no such field")
        if size is not None:
            fields[key] = size
    return fields


def _kv_heads(family: str, num_heads: int) -> int:
    """Return 2; for latent attention the number of query heads, because every release has it so."""
    latent = family in FAMILIES and "kv_lora_rank" in FAMILIES[family].config.CHECKPOINT_FIELDS
    return num_heads if latent else 2


def _write(
    folder: Path,
    config: dict[str, Any],
    num_shards: int,
    seed: int,
    overwrite: bool,
    layout: ExpertLayout,
) -> Path:
    """Write all files and return the folder; without weights for 0 shards. Nothing is written if a value is wrong."""
    dense = config.get("mlp_only_layers", ())
    if any(layer not in range(config["num_hidden_layers"]) for layer in dense):
        raise ValueError(f"mlp_only_layers: {dense} names a layer that is not there")
    model = parse_model_config(config, {}, "config.json")
    tensors = checkpoint_tensors(model, layout)
    if num_shards > len(tensors):
        raise ValueError(f"num_shards: {num_shards} is not between 1 and {len(tensors)} tensors")
    _prepare_folder(folder, overwrite)
    if num_shards:
        index = write_weights(folder, model, tensors, num_shards, seed)
        if num_shards > 1:
            _write_json(folder / "model.safetensors.index.json", index)
    nested = getattr(FAMILIES[model.model_type].config, "nested", dict)
    _write_json(folder / "config.json", nested(config))
    _write_json(folder / "generation_config.json", generation_config(list(range(256, 259))))
    save_tokenizer(folder, byte_tokenizer(), model.max_position_embeddings)
    return folder


def _refuse_renamed(config_fields: dict[str, Any]) -> None:
    """Refuse config.json's name of a field that has a parameter of its own: it would be given twice."""
    for name, parameter in _RENAMED.items():
        if name in config_fields:
            raise ValueError(f"{name}: give {parameter} instead")


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer: id b < 256 is byte b, followed by the special tokens. Round trips are exact."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {byte: chr(byte) for byte in printable}
    for byte in range(NUM_BYTES):  # the byte-level alphabet: unprintable bytes move past 255
        stand_in.setdefault(byte, chr(NUM_BYTES + len(stand_in) - len(printable)))
    vocab = {stand_in[byte]: byte for byte in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the ChatML template inside the latter."""
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [IM_START],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def generation_config(special_ids: list[int]) -> dict[str, Any]:
    """Return generation_config.json for the ids of SPECIAL_TOKENS: either end token stops a generation."""
    end_of_text, _, im_end = special_ids
    return {"eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text}


def _validate(sizes: dict[str, int | None]) -> None:
    """Refuse values that the family's reader would not refuse under the name of the parameter."""
    for key, value in sizes.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            name = _RENAMED.get(key, key)
            raise ValueError(f"{name}: needs a whole number of at least 1, got {value!r}")
    heads, kv_heads, vocab_size = (
        sizes[key] or 0 for key in ("num_attention_heads", "num_key_value_heads", "vocab_size")
    )
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads: {kv_heads} does not divide num_heads = {heads}")
    if vocab_size < NUM_BYTES + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size: {vocab_size} is less than the tokenizer's 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens"
        )


def _prepare_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path: {folder} is a file, not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"path: {folder} is not empty; overwrite=True replaces a checkpoint there")
    for pattern in ("model*.safetensors", "model.safetensors.index.json"):
        for stale in folder.glob(pattern):  # old shards beside new ones would be read as surplus
            stale.unlink()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
