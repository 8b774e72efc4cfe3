"""Reads from a checkpoint's files how its prompts become vectors or scores. Needs no torch.

config.json describes the weights: of a base model, of a generating model, or with a classification head. The files of
sentence-transformers describe what follows the model: modules.json, and a config.json for each module.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.config import ModelSection, PoolingConfig, Task
from workers.hub import MODULES
from workers.models.config_reader import read_json
from workers.specs.pooling import Activation, PoolingSpec
from workers.wire.request import PoolingRows

TRANSFORMERS_SETTINGS = "config_sentence_transformers.json"
TEXT_SETTINGS = "sentence_bert_config.json"
# Keywords beside those of the chat template in `processing_kwargs.chat_template`: of cuts and of tensors.
NOT_OF_TEMPLATES = ("max_length", "padding", "restore_suffix", "return_tensors", "truncation")
OLD_ACTIVATION = "sbert_ce_default_activation_function"
_POOLING: dict[str, PoolingRows] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
# transformers' keys of the older form of a pooling module, by mode.
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_MODULE_KINDS = ("Transformer", "Pooling", "Normalize", "LogitScore")
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
ModelPart = Literal["causal", "base", "classes"]


@dataclass(frozen=True)
class Modules:
    """What sentence-transformers does behind the model; all None and False without its files.

    pooling       mode of the Pooling module
    score_tokens  ids of the LogitScore module: (false, true), or (true,)
    activation    dotted name of the function of scores
    skips_prompt  the Pooling module leaves out the tokens of a prompt, and the checkpoint names prompts
    chat_options  texts are messages: the keywords of the chat template
    """

    pooling: str | None = None
    normalizes: bool = False
    score_tokens: tuple[int, ...] | None = None
    activation: str | None = None
    skips_prompt: bool = False
    chat_options: Mapping[str, Any] | None = None


NO_MODULES = Modules()


def read_modules(folder: Path, problems: list[str]) -> Modules:
    """Return the modules of a checkpoint folder."""
    if not (folder / MODULES).is_file():
        return NO_MODULES
    found = read_json(folder, MODULES, required=True, kind=list)
    paths = {str(it.get("type", "")).rpartition(".")[2]: it.get("path", "") for it in found}
    unknown = [kind for kind in paths if kind not in _MODULE_KINDS]
    if unknown:
        problems.append(
            f"{MODULES} has the module {unknown[0]!r}; supported: {', '.join(_MODULE_KINDS)}"
        )
        return NO_MODULES
    tokens, pooling, skips = None, None, False
    settings = read_json(folder, TRANSFORMERS_SETTINGS, required=False)
    options = _chat_options(read_json(folder, TEXT_SETTINGS, required=False))
    if "Pooling" in paths:
        config = read_json(folder / paths["Pooling"], "config.json", required=True)
        pooling = _pooling_mode(config)
        # a prompt beside messages is a system message, which counts
        prompted = options is None and any((settings.get("prompts") or {}).values())
        skips = config.get("include_prompt") is False and prompted
    if "LogitScore" in paths:
        ids = read_json(folder / paths["LogitScore"], "config.json", required=True)
        both = ids.get("false_token_id"), ids.get("true_token_id")
        tokens = tuple(token_id for token_id in both if token_id is not None)
    return Modules(
        pooling=pooling,
        normalizes="Normalize" in paths,
        score_tokens=tokens,
        activation=settings.get("activation_fn"),
        skips_prompt=skips,
        chat_options=options,
    )


def _chat_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keywords of the chat template if the Transformer module makes messages of texts, else None.

    Versions before 5.4 wrote no `modality_config`; their texts are prompts without a template, also where the
    tokenizer has one.
    """
    if "message" not in (config.get("modality_config") or ()):
        return None
    options = (config.get("processing_kwargs") or {}).get("chat_template") or {}
    return {key: value for key, value in options.items() if key not in NOT_OF_TEMPLATES}


def _pooling_mode(config: Mapping[str, Any]) -> str:
    """Return the modes of a Pooling module, joined by + where there are several, which are concatenated."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return mode if isinstance(mode, str) else "+".join(mode)
    return "+".join(mode for key, mode in _POOLING_KEYS.items() if config.get(key))


def parts_of(causal: str) -> dict[str, ModelPart]:
    """Return what a checkpoint holds by its architecture, of the family with the generating architecture `causal`."""
    stem = causal.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    return {
        causal: "causal",
        f"{stem}Model": "base",
        f"{stem}TextModel": "base",
        f"{stem}ForSequenceClassification": "classes",
    }


def part_of(architectures: Any, causal: str) -> ModelPart | None:
    """Return what of a model of the family `causal` a checkpoint holds; None: of another family."""
    if architectures is None:
        return "causal"
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    return parts_of(causal).get(architectures[0])


def read_pooling(
    raw: Mapping[str, Any],
    part: ModelPart,
    modules: Modules,
    section: ModelSection | None,
    problems: list[str],
) -> PoolingSpec | None:
    """Return how prompts become vectors or scores; None: the model generates. `section` is that of the YAML, if any."""
    wanted = "auto" if section is None else section.task
    settings = PoolingConfig() if section is None else section.pooling
    labels = _labels(raw) if part == "classes" else ()
    task = _task(raw, part, modules, labels) if wanted == "auto" else wanted
    problems += _conflicts(task, part, labels, bool(raw.get("tie_word_embeddings")))
    if task == "generate":
        return None
    rows: PoolingRows = "last"
    if settings.type != "auto":
        rows = settings.type
    elif modules.pooling is not None:
        if modules.pooling not in _POOLING:
            problems.append(
                f"the Pooling module has the mode {modules.pooling!r}; supported: {', '.join(_POOLING)}"
            )
        rows = _POOLING.get(modules.pooling, "last")
        if modules.skips_prompt and rows != "last":
            problems.append(
                "the Pooling module has include_prompt: false, but the tokens of prompts are not left out here; "
                f"model.pooling.type: {rows} counts them like those of the text"
            )
    normalize = modules.normalizes or modules.pooling is None
    return PoolingSpec(
        task=task,
        size=_hidden_size(raw),
        rows=rows,
        normalize=normalize if settings.normalize == "auto" else settings.normalize,
        dimensions=_dimensions(raw, settings, problems) if task == "embed" else (),
        labels=labels,
        activation=_activation(raw, task, labels, modules, problems),
        score_tokens=_score_tokens(raw, modules, settings)
        if task == "score" and not labels
        else None,
        score_template=settings.score_template,
        chat_options=modules.chat_options,
    )


def _task(
    raw: Mapping[str, Any], part: ModelPart, modules: Modules, labels: tuple[str, ...]
) -> Task:
    if part == "classes":
        return "score" if len(labels) == 1 else "classify"
    if part == "base" or modules.pooling is not None:
        return "embed"
    return "score" if modules.score_tokens or raw.get("classifier_from_token") else "generate"


def _conflicts(task: Task, part: ModelPart, labels: tuple[str, ...], tied: bool) -> Iterator[str]:
    has = {
        "causal": "a generating model",
        "base": "a base model without logits",
        "classes": f"a model with a classification head of {len(labels)} class(es)",
    }[part]
    fits = {
        "generate": part == "causal" or (part == "base" and tied),
        "embed": part != "classes",
        "classify": part == "classes",
        "score": len(labels) == 1 if part == "classes" else part == "causal" or tied,
    }[task]
    if not fits:
        yield f"model.task is {task}, but the checkpoint is {has}"


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes; transformers' two where config.json has none."""
    names = raw.get("id2label")
    if isinstance(names, Mapping) and names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    number = raw.get("num_labels")
    return tuple(f"LABEL_{index}" for index in range(number if isinstance(number, int) else 2))


def _activation(
    raw: Mapping[str, Any],
    task: Task,
    labels: tuple[str, ...],
    modules: Modules,
    problems: list[str],
) -> Activation:
    if task == "embed":
        return "none"
    name = modules.activation or _saved_activation(raw)
    if name is not None:
        if (known := _ACTIVATIONS.get(str(name).rpartition(".")[2])) is None:
            problems.append(f"activation_fn is {name!r}; supported: {', '.join(_ACTIVATIONS)}")
        return known or "none"
    problem = raw.get("problem_type")
    if problem == "regression":
        return "none"
    return "softmax" if len(labels) > 1 and problem != "multi_label_classification" else "sigmoid"


def _saved_activation(raw: Mapping[str, Any]) -> Any:
    """Return the function of scores that a CrossEncoder of sentence-transformers wrote into config.json."""
    saved = raw.get("sentence_transformers")
    if isinstance(saved, Mapping) and "activation_fn" in saved:
        return saved["activation_fn"]
    return raw.get(OLD_ACTIVATION)  # before version 4


def _dimensions(
    raw: Mapping[str, Any], settings: PoolingConfig, problems: list[str]
) -> tuple[int, ...] | None:
    size = _hidden_size(raw)
    if settings.dimensions == "any":
        return None
    found = raw.get("matryoshka_dimensions") or ()
    if settings.dimensions == "auto" and not found:
        return None if raw.get("is_matryoshka") else ()
    dimensions = found if settings.dimensions == "auto" else settings.dimensions
    wrong = [it for it in dimensions if not isinstance(it, int) or not 0 < it <= size]
    if wrong:
        problems.append(f"matryoshka dimensions: {wrong[0]!r}; expected 1 to hidden_size ({size})")
    return tuple(sorted(dimensions))


def _hidden_size(raw: Mapping[str, Any]) -> int:
    size = raw.get("hidden_size")
    return size if isinstance(size, int) else 0  # the family complains


def _score_tokens(
    raw: Mapping[str, Any], modules: Modules, settings: PoolingConfig
) -> tuple[str | int, ...]:
    if settings.score_tokens != "auto":
        return tuple(settings.score_tokens)
    if modules.score_tokens:
        return modules.score_tokens
    return tuple(raw.get("classifier_from_token") or ("no", "yes"))
