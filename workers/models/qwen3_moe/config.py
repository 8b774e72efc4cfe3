"""Reads a checkpoint's config.json into a `Qwen3MoeConfig`; refuses what the model cannot compute.

Plain json and arithmetic: imports neither torch nor transformers, so a configuration check or an
ingress can use it. Knows nothing of weights, ranks or devices. Missing keys take transformers'
own defaults.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.models.rope_config import RopeConfig, is_number, parse_rope
from workers.weights.quantization import BlockQuantization, parse_quantization

DtypeName = Literal["float32", "bfloat16", "float16"]

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")

# Keys of which only these values leave the mathematics as it is here.
FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "chunk_size_feed_forward": (0, None),
    "is_encoder_decoder": (False, None),
    "partial_rotary_factor": (1, None),
    "use_qk_norm": (True, None),  # Qwen3-MoE always normalises q and k
}

# Keys that do not change what a forward computes: training, bookkeeping, output switches, tokens.
# fmt: off
HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation", "_name_or_path", "attention_dropout", "attn_implementation",
        "bos_token_id", "id2label", "initializer_range", "label2id", "max_window_layers",
        "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
        "output_router_logits", "pad_token_id", "problem_type", "return_dict",
        "router_aux_loss_coef", "sliding_window", "transformers_version", "unsloth_fixed",
        "unsloth_version", "use_cache",
    }
)
# fmt: on

ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
OTHER_READ_KEYS = frozenset(
    {
        "model_type",
        "architectures",
        "torch_dtype",
        "eos_token_id",
        "layer_types",
        "num_local_experts",
        "quantization_config",
    }
)


class ModelConfigError(ValueError):
    """A config.json that this model cannot honour: each field, its value, and what would do."""


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig:
    """Every field of config.json that changes the mathematics, under its Hugging Face name."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    rope: RopeConfig
    quantization: BlockQuantization | None
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer has experts; the others have one dense MLP of `intermediate_size`."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def q_size(self) -> int:
        """Width of all query heads together; may differ from hidden_size."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim


def load_model_config(path: str | Path) -> Qwen3MoeConfig:
    """The config of a checkpoint folder; ModelConfigError names everything that is wrong."""
    folder = Path(path)
    raw = _read_json(folder, "config.json", required=True)
    generation = _read_json(folder, "generation_config.json", required=False)
    return parse_model_config(raw, generation, str(folder / "config.json"))


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> Qwen3MoeConfig:
    """The config of a config.json and a generation_config.json; `where` begins its errors."""
    problems: list[str] = []
    _check_architecture(raw, problems)
    if problems:  # the fields of another architecture would only add noise
        raise ModelConfigError(f"{where}: " + "; ".join(problems))
    fields = _read_fields(raw, generation, problems)
    _check_fixed_and_unknown(raw, problems)
    if not problems:
        _check_shapes(fields, problems)
    if problems:
        raise ModelConfigError(f"{where}: " + "; ".join(problems))
    return Qwen3MoeConfig(**fields)


def _read_json(folder: Path, name: str, *, required: bool) -> dict[str, Any]:
    file = folder / name
    if not folder.is_dir():
        raise ModelConfigError(
            f"model path {str(folder)!r} is not a folder; expected a checkpoint on this machine "
            "(nothing is downloaded: `hf download NAME --local-dir FOLDER` does that)"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelConfigError(
            f"{folder} holds no {name}; expected a Hugging Face checkpoint"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} holds a {type(raw).__name__}; expected a JSON object")
    return raw


def _check_architecture(raw: Mapping[str, Any], problems: list[str]) -> None:
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        problems.append(f"model_type is {model_type!r}; supported: {MODEL_TYPE!r}")
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURE]:
        problems.append(f"architectures is {architectures!r}; supported: {[ARCHITECTURE]!r}")


class _Reader:
    """Typed reads of a JSON object that collect complaints instead of raising."""

    def __init__(self, raw: Mapping[str, Any], problems: list[str]):
        self.raw = raw
        self.problems = problems

    def _get(self, key: str, default: Any, good: Callable[[Any], bool], wanted: str) -> Any:
        value = self.raw.get(key, default)
        if not good(value):
            self.problems.append(f"{key} is {value!r}; expected {wanted}")
            return default
        return value

    def integer(self, key: str, default: int, minimum: int = 1) -> int:
        return self._get(
            key, default, lambda v: _is_int(v) and v >= minimum, f"a whole number >= {minimum}"
        )

    def number(self, key: str, default: float) -> float:
        return float(
            self._get(
                key,
                default,
                lambda v: is_number(v) and v > 0,
                "a number > 0",
            )
        )

    def boolean(self, key: str, default: bool) -> bool:
        return self._get(key, default, lambda v: isinstance(v, bool), "true or false")

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, or one alone; null or missing is the empty tuple."""
        value = self.raw.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in items):
            self.problems.append(f"{key} is {value!r}; expected whole numbers >= 0")
            return ()
        return tuple(items)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_fields(
    raw: Mapping[str, Any], generation: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    read = _Reader(raw, problems)
    hidden_size = read.integer("hidden_size", 2048)
    num_heads = read.integer("num_attention_heads", 32)
    max_positions = read.integer("max_position_embeddings", 32768)
    # transformers stops at generation_config's ids where there are some, else at config.json's
    stops = _Reader(generation, problems).integers("eos_token_id")
    return {
        "vocab_size": read.integer("vocab_size", 151936),
        "hidden_size": hidden_size,
        "intermediate_size": read.integer("intermediate_size", 6144),
        "num_hidden_layers": read.integer("num_hidden_layers", 24),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.integer("num_key_value_heads", 4),
        "head_dim": max(hidden_size // num_heads, 1)
        if raw.get("head_dim") is None
        else read.integer("head_dim", 128),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", False),
        "attention_bias": read.boolean("attention_bias", False),
        "decoder_sparse_step": read.integer("decoder_sparse_step", 1),
        "mlp_only_layers": read.integers("mlp_only_layers"),
        "moe_intermediate_size": read.integer("moe_intermediate_size", 768),
        "num_experts": _read_num_experts(read),
        "num_experts_per_tok": read.integer("num_experts_per_tok", 8),
        "norm_topk_prob": read.boolean("norm_topk_prob", False),
        "rope": parse_rope(raw, max_positions, problems),
        "quantization": parse_quantization(raw, problems),
        "dtype": _read_dtype(raw, problems),
        "eos_token_ids": stops or read.integers("eos_token_id"),
    }


def _read_num_experts(read: _Reader) -> int:
    """transformers 5 writes `num_local_experts`, older versions `num_experts`."""
    old, new = read.raw.get("num_experts"), read.raw.get("num_local_experts")
    if old is not None and new is not None and old != new:
        read.problems.append(
            f"num_experts is {old!r} but num_local_experts is {new!r}; expected one number"
        )
    return read.integer("num_local_experts" if new is not None else "num_experts", 128)


def _read_dtype(raw: Mapping[str, Any], problems: list[str]) -> DtypeName:
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        problems.append(f"{key} is {value!r}; supported: {', '.join(DTYPES)}")
        return "float32"
    return value


def _check_fixed_and_unknown(raw: Mapping[str, Any], problems: list[str]) -> None:
    fields = Qwen3MoeConfig.__dataclass_fields__.keys() - {"rope", "eos_token_ids", "quantization"}
    known = fields | HARMLESS_KEYS | ROPE_KEYS | OTHER_READ_KEYS
    for key, value in raw.items():
        if key in FIXED_VALUES:
            if value not in FIXED_VALUES[key]:
                wanted = " or ".join(json.dumps(allowed) for allowed in FIXED_VALUES[key])
                problems.append(f"{key} is {_short(value)}; supported: {wanted}")
        elif key not in known and value is not None:
            problems.append(
                f"{key} is {_short(value)}; unknown key that may change the mathematics"
            )
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(
        kind not in ("full_attention", "attention") for kind in layer_types
    ):
        problems.append(
            f"layer_types is {_short(layer_types)}; supported: full_attention everywhere"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_shapes(fields: Mapping[str, Any], problems: list[str]) -> None:
    """Relations between fields, each of them valid alone."""
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if heads % kv_heads:
        problems.append(
            f"num_attention_heads is {heads}; "
            f"expected a multiple of num_key_value_heads ({kv_heads})"
        )
    if fields["head_dim"] % 2:
        problems.append(
            f"head_dim is {fields['head_dim']}; expected an even number (RoPE turns pairs)"
        )
    if fields["num_experts_per_tok"] > fields["num_experts"]:
        problems.append(
            f"num_experts_per_tok is {fields['num_experts_per_tok']}; "
            f"expected at most num_experts ({fields['num_experts']})"
        )
