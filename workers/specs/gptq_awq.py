"""Reads the `quantization_config` of GPTQ and AWQ checkpoints: weights in four bits. Knows nothing of tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kernels.four_bit_format import GROUPS, FourBitFormat
from workers.specs.four_bit import FourBitForm, Packing

# The supported values of each field; None stands for null and for a missing field.
GPTQ: dict[str, tuple[Any, ...]] = {
    "bits": (4,),
    "group_size": GROUPS,
    "desc_act": (None, False, True),
    "sym": (True, False),
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "pack_dtype": (None, "int32"),
    "lm_head": (None, False),
    "is_marlin_format": (None, False),
}
AWQ: dict[str, tuple[Any, ...]] = {
    "bits": (4,),
    "group_size": GROUPS,
    "zero_point": (True, False),  # false: GPTQModel stores zero points none the less, all 8
    "sym": (None, True, False),  # transformers' default beside zero_point, which counts
    "desc_act": (None, False),
    "version": (None, "gemm", "GEMM"),
    "pack_dtype": (None, "int32"),
    "lm_head": (None, False),
}
# Fields under which GPTQModel and transformers write the value of another field again.
GPTQ_REPEATED = {"method": "quant_method", "format": "checkpoint_format"}
AWQ_REPEATED = {"method": "quant_method", "format": "version", "checkpoint_format": "version"}
# Fields of the calibration, and of kernels that other engines choose.
IGNORED = frozenset(
    {
        *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta"),
        *("model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size", "backend"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "max_input_length"),
        *("cache_block_outputs", "cache_examples_on_gpu", "use_cuda_fp16", "use_exllama", "exllama_config"),
        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "mse", "is_distributed", "act_group_aware"),
        "model_seqlen",
    }
)  # fmt: skip
SKIPPED, CHOSEN, DYNAMIC = (
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
    "dynamic",
)


@dataclass(frozen=True)
class FourBitQuantization:
    """Four bits in one form.

    skipped    parts of names of modules that are not quantised
    patterns   regular expressions from the start of such names
    chosen     ends of the names of the quantised modules; (): all
    """

    cache_scales: ClassVar[bool] = False

    stored: FourBitForm
    skipped: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = field(default=())
    chosen: tuple[str, ...] = ()

    def form(self, tensor: str) -> FourBitForm | None:
        """Return the form, None if the tensor's module is not quantised."""
        module = tensor.rpartition(".")[0]
        if any(part in module for part in self.skipped):
            return None
        if any(pattern.match(module) for pattern in self.patterns):
            return None
        if self.chosen and not module.endswith(self.chosen):
            return None
        return self.stored


def parse_gptq(found: Mapping[str, Any], key: str, problems: list[str]) -> FourBitQuantization:
    """Return the quantisation; complaints that begin with `key` go to `problems`."""
    found = _merged(found, GPTQ_REPEATED, key, problems)
    _check(found, GPTQ, (SKIPPED, CHOSEN, DYNAMIC), key, problems)
    v2 = found.get("checkpoint_format") == "gptq_v2"
    form = FourBitForm(
        Packing.GPTQ_V2 if v2 else Packing.GPTQ,
        FourBitFormat(
            "int4", _group(found), found.get("sym") is False, bool(found.get("desc_act"))
        ),
    )
    chosen = found.get(CHOSEN) or []
    names = [name for part in chosen for name in (part if isinstance(part, list) else [part])]
    return FourBitQuantization(
        form,
        _names(found.get(SKIPPED), f"{key}.{SKIPPED}", problems),
        _left_out(found.get(DYNAMIC), f"{key}.{DYNAMIC}", problems),
        _names(names, f"{key}.{CHOSEN}", problems),
    )


def parse_awq(found: Mapping[str, Any], key: str, problems: list[str]) -> FourBitQuantization:
    """Return the quantisation; complaints that begin with `key` go to `problems`."""
    found = _merged(found, AWQ_REPEATED, key, problems)
    _check(found, AWQ, (SKIPPED, DYNAMIC), key, problems)
    form = FourBitForm(Packing.AWQ, FourBitFormat("int4", _group(found), zeros=True))
    return FourBitQuantization(
        form,
        _names(found.get(SKIPPED), f"{key}.{SKIPPED}", problems),
        _left_out(found.get(DYNAMIC), f"{key}.{DYNAMIC}", problems),
    )


def _merged(
    found: Mapping[str, Any], repeated: Mapping[str, str], key: str, problems: list[str]
) -> dict[str, Any]:
    """Return the fields without the repeated ones; each must have the value of the field that it repeats."""
    merged = {name: value for name, value in found.items() if name not in repeated}
    for name, field_name in repeated.items():
        value = found.get(name)
        if value is None:
            continue
        other = merged.setdefault(field_name, value)
        if other is None:
            merged[field_name] = value
        elif str(value).lower() != str(other).lower():
            problems.append(f"{key}.{name} is {value!r}, but {field_name} is {other!r}")
    return merged


def _group(found: Mapping[str, Any]) -> int:
    group = found.get("group_size")
    return group if group in GROUPS else GROUPS[0]


def _names(value: Any, key: str, problems: list[str]) -> tuple[str, ...]:
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"{key} is {value!r}; expected a list of module names")
        return ()
    return tuple(names)


def _left_out(value: Any, key: str, problems: list[str]) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of modules that GPTQModel's `dynamic` leaves out; it may also give them other settings."""
    patterns = []
    for rule in [] if value is None else value:
        if not isinstance(rule, str) or not rule.startswith("-:"):
            problems.append(
                f"{key} holds {rule!r}; supported: rules that begin with -: (not quantised)"
            )
            continue
        try:
            patterns.append(re.compile(rule[2:]))
        except re.error as error:
            problems.append(f"{key} holds {rule!r}; no regular expression: {error}")
    return tuple(patterns)


def _check(
    found: Mapping[str, Any],
    supported: Mapping[str, tuple[Any, ...]],
    others: tuple[str, ...],
    key: str,
    problems: list[str],
) -> None:
    """Complain about other values than the supported ones, and about unknown fields."""
    for name, values in supported.items():
        value = found.get(name)
        if not any(value == good and type(value) is type(good) for good in values):
            wanted = " or ".join("null" if good is None else str(good) for good in values)
            problems.append(f"{key}.{name} is {value!r}; supported: {wanted}")
    for name, value in found.items():
        if (
            name not in supported
            and name not in others
            and name not in IGNORED
            and value is not None
        ):
            problems.append(f"{key}.{name} is {value!r}; unknown key that may change the weights")
