"""Typed reads of a checkpoint's config.json for the families; collects complaints instead of raising.

A family reads its fields through one `ConfigReader`, which afterwards refuses every key that nothing has read. Plain
json and arithmetic: needs neither torch nor transformers. Knows nothing of weights, ranks or devices.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernels.activation import Activation
from kernels.four_bit_format import FourBitFormat
from workers.models.rope_config import PARTIAL, is_number, parse_partial_rotary, parse_rope
from workers.specs.four_bit import FourBitForm, Packing
from workers.specs.model import (
    DTYPES,
    DtypeName,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    WeightEntries,
)
from workers.specs.quantization import parse_quantization
from workers.specs.rope import RopeSpec
from workers.weights.tensors import four_bit_problem

# Keys that do not change what a forward computes: training, bookkeeping, output switches, tokens.
# fmt: off
HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
        "auto_map", "bos_token_id", "classifier_from_token", "id2label", "initializer_range", "is_matryoshka",
        "is_original_qwen3_reranker", "label2id", "matryoshka_dimensions", "method", "model_type", "name_or_path",
        "num_labels", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
        "problem_type", "return_dict", "router_aux_loss_coef", "sbert_ce_default_activation_function",
        "sentence_transformers", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
    }
)
# fmt: on
# Keys with the values that every family here computes; other values would change the results.
FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "chunk_size_feed_forward": (0, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    PARTIAL: (1, None),
}
# Activations of the gated MLP under transformers' names.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
FULL_ATTENTION = ("full_attention", "attention")
WINDOW_ATTENTION = "sliding_attention"
LINEAR_ATTENTION = "linear_attention"


# transformers' values of keys that config.json may lack, in most families. A size has none, because every writer of
# config.json writes it, and a forward with a wrong size fails or computes nonsense.
DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


class ModelConfigError(ValueError):
    """A config.json that no model here supports; names each field, its value and the supported values."""


class ConfigReader:
    """Reads of config.json. A key without a default must be there.

    defaults     of the family, beside DEFAULTS
    generation   generation_config.json, empty where the checkpoint has none
    processor    preprocessor_config.json, empty where the checkpoint has none
    problems     complaints so far; each names a key, its value and what is expected
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        defaults: Mapping[str, Any],
        generation: Mapping[str, Any],
        weight_entries: WeightEntries,
        processor: Mapping[str, Any] | None = None,
    ):
        self.problems: list[str] = []
        self.processor = processor or {}
        self._raw = raw
        self._defaults = {**DEFAULTS, **defaults}
        self._generation = generation
        self._weight_entries = weight_entries
        self._read = set(HARMLESS_KEYS)
        self._fixed = dict(FIXED_VALUES)
        self._reads_layer_types = False  # the family does so itself

    def raw(self, key: str) -> Any:
        """Return the value unchecked, None if it is missing; mark the key as read."""
        self._read.add(key)
        return self._raw.get(key)

    def integer(self, key: str) -> int:
        """Return a whole number >= 1."""
        return self._integer(key, self._defaults.get(key))

    def integer_or(self, key: str, default: int) -> int:
        """Return a whole number >= 1; `default` if the key is null, or missing without an entry in the defaults."""
        if self._raw.get(key, self._defaults.get(key)) is None:
            self.ignore(key)
            return default
        return self._integer(key, self._defaults.get(key, default))

    def count(self, key: str) -> int:
        """Return a whole number >= 0."""
        default = self._defaults.get(key)
        value: int = self._typed(
            key, default, lambda v: _is_int(v) and v >= 0, "a whole number >= 0"
        )
        return value

    def number(self, key: str) -> float:
        """Return a number > 0."""
        default = self._defaults.get(key)
        return float(self._typed(key, default, lambda v: is_number(v) and v > 0, "a number > 0"))

    def number_or_none(self, key: str) -> float | None:
        """Return a number > 0, or None if the key is missing or null."""
        if self.raw(key) is None:
            return None
        value: float = self._typed(key, 1.0, lambda v: is_number(v) and v > 0, "a number > 0")
        return float(value)

    def boolean(self, key: str) -> bool:
        """Return true or false."""
        default = self._defaults.get(key)
        value: bool = self._typed(key, default, lambda v: isinstance(v, bool), "true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return whole numbers >= 0, from a list or a single number; () if the key is missing or null."""
        self._read.add(key)
        return self._integers(self._raw, key)

    def fixed(self, key: str, *supported: Any) -> None:
        """Complain if the key has another value than `supported`."""
        value = self.raw(key)
        if key in self._raw and value not in supported:
            wanted = " or ".join(json.dumps(allowed) for allowed in supported)
            self.problems.append(f"{key} is {_short(value)}; supported: {wanted}")

    def ignore(self, *keys: str) -> None:
        """Mark keys as read: no forward depends on them."""
        self._read.update(keys)

    def layers_with_experts(self) -> tuple[bool, ...]:
        """Return which layers have experts, by `decoder_sparse_step` and `mlp_only_layers`."""
        step, dense = self.integer("decoder_sparse_step"), self.integers("mlp_only_layers")
        return tuple(
            layer not in dense and (layer + 1) % step == 0
            for layer in range(self.integer("num_hidden_layers"))
        )

    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer, None for full attention; without `layer_types`, even layers have one."""
        self._reads_layer_types = True
        window, count = self.integer("sliding_window"), self.integer("num_hidden_layers")
        kinds = self.raw("layer_types")
        if kinds is None:
            return tuple(None if layer % 2 else window for layer in range(count))
        known = (*FULL_ATTENTION, WINDOW_ATTENTION)
        if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - set(known):
            self.problems.append(
                f"layer_types is {_short(kinds)}; expected {count} times full_attention or {WINDOW_ATTENTION}"
            )
            return (None,) * count
        return tuple(window if kind == WINDOW_ATTENTION else None for kind in kinds)

    def linear_layers(self) -> tuple[bool, ...]:
        """Return which layers have linear attention, by `layer_types` or `full_attention_interval`."""
        self._reads_layer_types = True
        interval, count = self.integer("full_attention_interval"), self.integer("num_hidden_layers")
        kinds = self.raw("layer_types")
        if kinds is None:
            return tuple((layer + 1) % interval > 0 for layer in range(count))
        known = (*FULL_ATTENTION, LINEAR_ATTENTION)
        if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - set(known):
            self.problems.append(
                f"layer_types is {_short(kinds)}; expected {count} times full_attention or {LINEAR_ATTENTION}"
            )
            return (False,) * count
        return tuple(kind == LINEAR_ATTENTION for kind in kinds)

    def mxfp4(self) -> FourBitForm | None:
        """Return how the experts are packed, for a family that has MXFP4 alone; None: they are not."""
        found = self._raw.get("quantization_config")
        if found is None:
            return None
        method = found.get("quant_method") if isinstance(found, dict) else found
        if method != "mxfp4":
            self.problems.append(
                f"quantization_config.quant_method is {_short(method)}; supported: mxfp4"
            )
        return FourBitForm(Packing.MXFP4, FourBitFormat("mxfp4", 32))

    def activation(self) -> Activation:
        """Return the activation of every MLP, silu if the key is missing."""
        self.fixed("hidden_act", *ACTIVATIONS)
        name = self._raw.get("hidden_act")
        return ACTIVATIONS[name] if name in tuple(ACTIVATIONS) else "silu"

    def rotary_dim(self, head_dim: int, default: float) -> int:
        """Return how many values of a head are rotated, for a family that may rotate a part; call it before `rope`."""
        self._fixed.pop(PARTIAL, None)
        self.ignore(PARTIAL)
        part = parse_partial_rotary(self._raw, default, self.problems)
        return int(head_dim * part + 1e-6)  # a part of 10 / 24 gives 10 of 24 values

    def rope(self) -> RopeSpec:
        """Return the rotary embedding, from the old or the new form."""
        self.ignore("rope_parameters", "rope_scaling", "rope_theta")
        length = self.integer("max_position_embeddings")
        theta, partial = self._defaults["rope_theta"], PARTIAL not in self._fixed
        return parse_rope(self._raw, theta, length, self.problems, partial=partial)

    def finish(
        self,
        layers: tuple[LayerSpec, ...],
        moe: MoeSpec,
        *,
        skipped: tuple[str, ...] = (),
        renamed: tuple[tuple[str, str], ...] = (),
        stacked_form: FourBitForm | None = None,
        norm_offset: float = 0.0,
    ) -> ModelConfig:
        """Return the config with the fields that all families share; it is valid only if `problems` is empty."""
        self._check_layer_types()
        # transformers stops at generation_config's ids where there are some, else at config.json's
        stops = self._integers(self._generation, "eos_token_id")
        config = ModelConfig(
            model_type=self.raw("model_type"),
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            layers=layers,
            moe=moe,
            norm_eps=self.number("rms_norm_eps"),
            max_position_embeddings=self.integer("max_position_embeddings"),
            tie_word_embeddings=self.boolean("tie_word_embeddings"),
            quantization=None
            if stacked_form
            else parse_quantization(self._raw, self.problems, renamed),
            dtype=self._dtype("bfloat16" if stacked_form else "float32"),
            eos_token_ids=stops or self.integers("eos_token_id"),
            skipped=skipped,
            renamed=renamed,
            stacked_form=stacked_form,
            norm_offset=norm_offset,
            weight_entries=self._weight_entries,
        )
        self.ignore("quantization_config", "eos_token_id")
        self.refuse_unread()
        if not self.problems:
            self._check_shapes(config)
        return config

    def refuse_unread(self) -> None:
        """Complain about every key that nothing has read, unless it has the value that all families compute."""
        for key, supported in self._fixed.items():
            self.fixed(key, *supported)
        for key, value in self._raw.items():
            if key not in self._read and value is not None:
                what = "unknown key that may change the mathematics"
                self.problems.append(f"{key} is {_short(value)}; {what}")

    def _integer(self, key: str, default: int | None) -> int:
        value: int = self._typed(
            key, default, lambda v: _is_int(v) and v >= 1, "a whole number >= 1"
        )
        return value

    def _typed(self, key: str, default: Any, good: Callable[[Any], bool], wanted: str) -> Any:
        self._read.add(key)
        value = self._raw.get(key, default)
        if not good(value):
            found = repr(value) if key in self._raw else "missing"
            self._complain(f"{key} is {found}; expected {wanted}")
            return 1 if default is None else default
        return value

    def _integers(self, raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
        value = raw.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in items):
            self._complain(f"{key} is {value!r}; expected whole numbers >= 0")
            return ()
        return tuple(items)

    def _dtype(self, default: DtypeName) -> DtypeName:
        key = "dtype" if self.raw("dtype") is not None else "torch_dtype"
        value = self.raw(key)
        if value is None:
            return default
        if value not in DTYPES:
            self.problems.append(f"{key} is {value!r}; supported: {', '.join(DTYPES)}")
            return default
        dtype: DtypeName = value
        return dtype

    def _check_layer_types(self) -> None:
        if self._reads_layer_types:
            return
        kinds = self.raw("layer_types") or []
        if not isinstance(kinds, list) or any(kind not in FULL_ATTENTION for kind in kinds):
            self.problems.append(
                f"layer_types is {_short(kinds)}; supported: full_attention everywhere"
            )

    def _check_shapes(self, config: ModelConfig) -> None:
        """Check relations between fields that are valid alone."""
        attention, experts, top_k = config.attention, config.num_experts, config.top_k
        if attention is not None:
            self.problems += attention.problems()
        self._check_groups(config.moe)
        self._check_four_bit(config)
        if top_k > experts:
            self.problems.append(
                f"num_experts_per_tok is {top_k}; expected at most the number of experts ({experts})"
            )

    def _check_four_bit(self, config: ModelConfig) -> None:
        if problem := four_bit_problem(config):
            self.problems.append(problem)

    def _check_groups(self, moe: MoeSpec) -> None:
        router, experts = moe.router, moe.num_experts
        groups, open_groups = router.num_groups, router.topk_group
        if experts % groups:
            self.problems.append(
                f"n_group is {groups}; expected a divisor of the number of experts ({experts})"
            )
        elif open_groups > groups:
            self.problems.append(
                f"topk_group is {open_groups}; expected at most n_group ({groups})"
            )
        elif open_groups < groups and experts // groups < 2 and router.group_score == "top2":
            self.problems.append(
                f"n_group is {groups}; expected two or more of the {experts} experts in a group"
            )
        elif router.top_k > open_groups * (experts // groups):
            self.problems.append(
                f"topk_group is {open_groups}; its groups hold {open_groups * (experts // groups)} experts, "
                f"fewer than num_experts_per_tok ({router.top_k})"
            )

    def _complain(self, problem: str) -> None:
        if problem not in self.problems:  # a key that is read twice
            self.problems.append(problem)


def read_json(folder: Path, name: str, *, required: bool, kind: type[Any] = dict) -> Any:
    """Return a JSON value of a checkpoint folder, empty if a file that is not required is missing.

    kind   dict for an object, list for an array
    """
    file = folder / name
    if not folder.is_dir():
        raise ModelConfigError(
            f"model path {str(folder)!r} is not a folder; expected a checkpoint's folder, or a name on "
            "the Hugging Face Hub such as Qwen/Qwen3-30B-A3B"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return kind()
        raise ModelConfigError(
            f"{folder} holds no {name}; expected a Hugging Face checkpoint"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, kind):
        wanted = "a JSON object" if kind is dict else "a JSON array"
        raise ModelConfigError(f"{file} holds a {type(raw).__name__}; expected {wanted}")
    return raw


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
