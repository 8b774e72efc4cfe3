"""The model families by config.json's `model_type`. A new family is its folder and one line here.

Configs are read without torch. All families are a `DecoderLM`, which their specs describe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from workers.config import ModelSection
from workers.models.config_reader import ConfigReader, ModelConfigError, read_json
from workers.models.pooling_reads import (
    NO_MODULES,
    Modules,
    part_of,
    parts_of,
    read_modules,
    read_pooling,
)
from workers.models.vision.reads import read_processor, without_vision
from workers.specs.model import ModelConfig
from workers.specs.modelopt import METHOD
from workers.specs.pooling import PoolingSpec
from workers.specs.quantization import KEY as QUANTISATION


@dataclass(frozen=True)
class Family:
    """A folder of `workers/models` with a `config.py` that reads config.json, and its architecture there."""

    folder: str
    architecture: str

    @property
    def config(self) -> ModuleType:
        """The module with DEFAULTS, NAMES and read_config; needs no torch.

        Of a family with a vision tower also `text_part`, see `workers.models.vision.reads`.
        """
        return import_module(f"workers.models.{self.folder}.config")


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("deepseek_v2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3ForCausalLM"),
    "ernie4_5_moe": Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "glm4_moe": Family("glm4_moe", "Glm4MoeForCausalLM"),
    "glm4_moe_lite": Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "glm4v_moe": Family("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
    "granitemoe": Family("granitemoe", "GraniteMoeForCausalLM"),
    "granitemoeshared": Family("granitemoe", "GraniteMoeSharedForCausalLM"),
    "gpt_oss": Family("gpt_oss", "GptOssForCausalLM"),
    "kimi_k2": Family("deepseek_v3", "DeepseekV3ForCausalLM"),
    "minimax_m2": Family("minimax_m2", "MiniMaxM2ForCausalLM"),
    "mixtral": Family("mixtral", "MixtralForCausalLM"),
    "olmoe": Family("olmoe", "OlmoeForCausalLM"),
    "qwen2_moe": Family("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3_5_moe": Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_5_moe_text": Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_next": Family("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_vl_moe": Family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
}

MODELOPT_FILE = "hf_quant_config.json"
LOGITS_HEAD = "lm_head."  # begins the names of its tensors
DEFAULT_FAMILY = "qwen3_moe"  # of checkpoints that are written


def load_model_config(path: str | Path, section: ModelSection | None = None) -> ModelConfig:
    """Return the config of a checkpoint folder; ModelConfigError names everything that is wrong.

    section   the section of the YAML, which chooses a task; None: the task of the checkpoint
    """
    folder = Path(path)
    raw = read_json(folder, "config.json", required=True)
    generation = read_json(folder, "generation_config.json", required=False)
    problems: list[str] = []
    modules = read_modules(folder, problems)
    where = str(folder / "config.json")
    if problems:
        raise ModelConfigError(f"{folder}: " + "; ".join(problems))
    raw, where = _with_modelopt(raw, folder, where)
    return parse_model_config(raw, generation, where, modules, section, read_processor(folder))


def _with_modelopt(raw: dict[str, Any], folder: Path, where: str) -> tuple[dict[str, Any], str]:
    """Return config.json with the quantisation that older versions of ModelOpt leave out of it, and `where`."""
    modelopt = read_json(folder, MODELOPT_FILE, required=False).get("quantization")
    if not isinstance(modelopt, Mapping):
        return raw, where
    found, algorithm = raw.get(QUANTISATION), modelopt.get("quant_algo")
    if found is None:
        found = {**modelopt, "quant_method": METHOD}
        return {**raw, QUANTISATION: found}, f"{where} with {MODELOPT_FILE}"
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if method != METHOD and algorithm is not None and not str(algorithm).startswith("FP8"):
        raise ModelConfigError(
            f"{where}: {QUANTISATION}.quant_method is {method!r}, but quant_algo in {MODELOPT_FILE} is "
            f"{algorithm!r}; the files of weights can have one of them"
        )
    return raw, where


def configured_model(section: ModelSection) -> ModelConfig:
    """Return the config of the checkpoint of a section of the YAML, with its task; raises ModelConfigError."""
    return load_model_config(section.folder, section)


def parse_model_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    where: str,
    modules: Modules = NO_MODULES,
    section: ModelSection | None = None,
    processor: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Return the config of a config.json, a generation_config.json and what follows; `where` begins its errors."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(map(repr, FAMILIES))
        raise ModelConfigError(f"{where}: model_type is {model_type!r}; supported: {supported}")
    part = part_of(architectures, family.architecture)
    if part is None:
        raise ModelConfigError(
            f"{where}: architectures is {architectures!r}; supported: {', '.join(parts_of(family.architecture))}"
        )
    text_part = getattr(family.config, "text_part", dict)
    source = family.config
    read = ConfigReader(text_part(raw), source.DEFAULTS, generation, source.NAMES, processor)
    config: ModelConfig = family.config.read_config(read)
    pooling = read_pooling(text_part(raw), part, modules, section, read.problems)
    if read.problems:
        raise ModelConfigError(f"{where}: " + "; ".join(read.problems))
    blind = pooling is not None or (section is not None and section.language_model_only)
    if config.vision is not None and blind:
        config = without_vision(config)
    return config if pooling is None else _with_pooling(config, pooling)


def _with_pooling(config: ModelConfig, pooling: PoolingSpec) -> ModelConfig:
    """Return the config with prompts that become vectors or scores; logits that nothing reads are not loaded."""
    has_logits = pooling.score_tokens is not None
    return replace(
        config,
        pooling=pooling,
        has_logits=has_logits,
        num_labels=len(pooling.labels),
        skipped=config.skipped if has_logits else (*config.skipped, LOGITS_HEAD),
    )
