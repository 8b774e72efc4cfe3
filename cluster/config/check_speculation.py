"""Checks of the section `speculation` against the model and the limits of a step. They yield problems, none raises."""

from collections.abc import Iterator

from cluster.config.errors import Problem
from cluster.config.phalanx_config import PhalanxConfig
from workers.models.config_reader import ModelConfigError
from workers.models.draft_config import load_draft_config
from workers.specs.model import ModelConfig


def check_speculation(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """Problems of a drafter that the model or the limits rule out."""
    speculation = config.speculation
    yield from _check_draft_model(config, model)
    if speculation.accept_lengths is not None and config.model.weights != "dummy":
        yield Problem(
            "speculation.accept_lengths",
            f"accepts drafts by chance, so that answers are wrong, and model.weights is {config.model.weights}; "
            "expected null, or model.weights dummy",
            ("model.weights",),
        )
    if speculation.method == "off":
        return
    if model is not None and model.pooling is not None:
        message = f"{speculation.method} drafts tokens, the task {model.pooling.task} has none; expected off"
        yield Problem("speculation.method", message, ("model.task", "model.path"))
    rows = 1 + speculation.num_draft_tokens
    limits = {
        "scheduler.max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "model.max_model_len": config.model.max_model_len,
    }
    for key, limit in limits.items():
        if limit != "auto" and rows > limit:
            yield Problem(
                "speculation.num_draft_tokens",
                f"{speculation.num_draft_tokens} drafts and the token before them are {rows} rows of one step, "
                f"{key} is {limit}; lower the first or raise the second",
                (key,),
            )


def _check_draft_model(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """The problem of a draft model, or of a checkpoint without one."""
    if model is not None:
        try:
            load_draft_config(config.speculation, config.model, model)
        except ModelConfigError as error:
            key, _, message = str(error).partition(": ")
            yield Problem(key, message, ("speculation.method", "model.path"))
