"""Loads a configuration: a YAML or a mapping with its overrides, checked, or one error with every problem.

Needs neither torch nor Ray. Fetches the description of a model that model.path names on the Hub.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config import examples
from cluster.config.checks import check_together
from cluster.config.errors import ConfigError, Problem, from_pydantic, show
from cluster.config.files import BY_ARGUMENT, BY_OPTION, ConfigSource, Overrides, read_config
from cluster.config.phalanx_config import PhalanxConfig
from workers import hub


def load_config(origin: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> PhalanxConfig:
    """Read a YAML or a mapping and apply overrides: `key.path=value` with values in YAML, or a mapping.

    The name of an example, such as "gpu-bench", stands for its YAML, unless there is a file of that name.
    Relative paths start at the YAML's folder, or at the current folder if a mapping or an override sets them. The
    result has absolute paths and a serve.model_name. If model.path is a name on the Hub, model.revision of the result
    is a commit, and all files of the model but the weights are in the cache. Raises ConfigError with all problems.
    """
    if isinstance(origin, Mapping):
        name, folder = "configuration", Path.cwd()
    else:
        path = Path(origin)
        if _is_model(path):
            message = f"expected a YAML configuration; --set model.path={path} serves a model"
            raise ConfigError.of(str(path), [Problem("", message)])
        try:
            origin = examples.find(path, examples.CONFIGS)
        except ValueError as error:
            raise ConfigError.of(str(origin), [Problem("", str(error))]) from None
        name, folder = str(origin), origin.absolute().parent
    return check_source(read_config(origin, overrides), name, folder)


def _is_model(path: Path) -> bool:
    """Whether a path is a checkpoint's folder, or looks like a name on the Hub, in the place of a YAML."""
    if path.exists():
        return (path / "config.json").is_file()
    return hub.is_name(str(path)) and path.suffix not in (".yaml", ".yml")


def check_source(source: ConfigSource, name: str, folder: Path) -> PhalanxConfig:
    """Return the configuration of settings that were read; fills `source.data`. Raises ConfigError with all problems.

    `name` begins the error; relative paths start at `folder`.
    """
    problems = list(source.problems)
    unreadable = any(not problem.key for problem in problems) and not source.data
    if not unreadable:
        _fill_derived(source, folder)
        config, field_problems = _validate(source.data)
        problems += field_problems
        if not any(problem.key.startswith("model") for problem in problems):
            config, hub_problems = _resolve_revision(config)
            problems += hub_problems
        wrong = {problem.key for problem in problems}
        problems += [p for p in check_together(config) if not _touches(p, wrong)]
        if not problems:
            return config
    raise ConfigError.of(name, problems, source.places)


def _touches(problem: Problem, wrong: set[str]) -> bool:
    """Whether a problem depends on a key, or on a section, that is wrong itself."""
    keys = {problem.key, *problem.involves}
    return bool(wrong & (keys | {key.partition(".")[0] for key in keys}))


def _fill_derived(source: ConfigSource, folder: Path) -> None:
    written = _text_at(source, "model", "path")
    absolute = _make_absolute(source, folder, "model", "path")
    model_name = Path(absolute).name if absolute else None
    if written and absolute and hub.is_name(written) and not os.path.exists(absolute):
        source.data["model"]["path"] = model_name = written
    serve = source.data.setdefault("serve", {})
    if model_name and isinstance(serve, dict) and serve.get("model_name") is None:
        serve["model_name"] = model_name
    _make_absolute(source, folder, "serve", "api_keys_file")
    _make_absolute(source, folder, "serve", "chat_template")
    _make_absolute(source, folder, "serve", "allowed_media_folder")
    _make_absolute(source, folder, "serve", "tls_cert_file")
    _make_absolute(source, folder, "serve", "tls_key_file")
    _make_absolute(source, folder, "kernels", "cache")
    _make_absolute(source, folder, "cache", "disk_path")
    _make_absolute(source, folder, "speculation", "draft_model")
    _make_absolute(source, folder, "experts", "map")
    _make_adapters_absolute(source, folder)


def _resolve_revision(config: PhalanxConfig) -> tuple[PhalanxConfig, list[Problem]]:
    """Fetch the description of a model of the Hub, and return the configuration with the commit as its revision."""
    model = config.model
    if os.path.isabs(model.path):
        if model.revision is None:
            return config, []
        message = f"{show(model.revision)} is for a name on the Hub; model.path is a folder here"
        return config, [Problem("model.revision", message)]
    try:
        commit = hub.fetch_description(model.path, model.revision)
    except hub.HubError as error:
        return config, [Problem(error.key, error.reason)]
    resolved = model.model_copy(update={"revision": commit})
    return config.model_copy(update={"model": resolved}), []


def _text_at(source: ConfigSource, section: str, key: str) -> str | None:
    values = source.data.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, str) and value else None


def _make_absolute(source: ConfigSource, folder: Path, section: str, key: str) -> str | None:
    """Make a path absolute: from `folder`, or from the current folder if an override sets it."""
    value = _text_at(source, section, key)
    if value is None:
        return None
    by_override = source.places.get(f"{section}.{key}") in (BY_OPTION, BY_ARGUMENT)
    base = Path.cwd() if by_override else folder
    absolute = os.path.normpath(base / Path(value).expanduser())
    source.data[section][key] = absolute
    return absolute


def _make_adapters_absolute(source: ConfigSource, folder: Path) -> None:
    """Make the paths of `lora.adapters` absolute, but for names on the Hub."""
    section = source.data.get("lora")
    adapters = section.get("adapters") if isinstance(section, dict) else None
    for index, adapter in enumerate(adapters if isinstance(adapters, list) else ()):
        path = adapter.get("path") if isinstance(adapter, dict) else None
        if not isinstance(path, str) or not path:
            continue
        by_override = any(
            source.places.get(key) in (BY_OPTION, BY_ARGUMENT)
            for key in ("lora.adapters", f"lora.adapters.{index}.path")
        )
        base = Path.cwd() if by_override else folder
        absolute = os.path.normpath(base / Path(path).expanduser())
        if os.path.exists(absolute) or not hub.is_name(path):
            adapter["path"] = absolute


def _validate(data: dict[str, Any]) -> tuple[PhalanxConfig, list[Problem]]:
    """The configuration and the problems of single fields; fields with a problem get their defaults."""
    try:
        return PhalanxConfig.model_validate(data, strict=True), []
    except ValidationError as error:
        problems = from_pydantic(error, PhalanxConfig)
    for problem in problems:
        data = _without(data, problem.key.split("."))
    model = {"path": "", **data.get("model", {})}
    return PhalanxConfig.model_validate({**data, "model": model}, strict=True), problems


def _without(data: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    head, *rest = parts
    kept = {key: value for key, value in data.items() if key != head}
    if rest and isinstance(data.get(head), dict):
        kept[head] = _without(data[head], rest)
    return kept
