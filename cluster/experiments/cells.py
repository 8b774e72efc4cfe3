"""The cells of an experiment, each with its checked configuration and workload.

Needs neither torch nor Ray, because a plan is printed at once; `machine_check` examines the machine.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config.errors import ConfigError, Problem, from_pydantic, show
from cluster.config.examples import DEMO
from cluster.config.files import ConfigSource, put, read_config
from cluster.config.load import check_source
from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments.sections import Kind, Sections, absolute
from cluster.experiments.sweep import Settings, expand, flat, short_names, swept_keys
from cluster.experiments.workload_files import content_hash
from cluster.experiments.workload_section import RequestWorkload, StepWorkload, Workload
from workers import hub
from workers.models.registry import load_model_config
from workers.specs.model import ModelConfig

WORKLOAD = "workload."
PATHS = ("model.path", "serve.api_keys_file", "serve.chat_template")
Engine = str  # digest of the settings that an engine is started with


@dataclass(frozen=True)
class Cell:
    """One combination of settings.

    name       the swept values: `ranks=2, input_len=64`
    settings   swept key -> value of this cell, as in the resolved configuration and workload
    engine     cells with equal engines share an engine without any change
    process    cells with equal processes share a start; the engine changes its settings between them
    """

    index: int
    name: str
    settings: Settings
    config: PhalanxConfig
    workload: Workload
    engine: Engine
    process: Engine

    @property
    def digest(self) -> str:
        """Hash of everything that the figures of the cell depend on in the files."""
        parts: list[Any] = [self.config.model_dump(mode="json")]
        parts.append(self.workload.model_dump(mode="json"))
        parts += [content_hash(path) for path in self.workload.files]
        return digest(parts)


def digest(value: Any) -> str:
    """Return the hash of plain data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class CellMaker:
    """Makes the cells of a file; collects problems of all cells, each once with the first cell that has it."""

    def __init__(self, sections: Sections, folder: Path):
        self._sections, self._folder = sections, folder
        self._base_path = DEMO
        if sections.base is not None:
            self._base_path = Path(absolute(sections.base, folder))
        self._base = read_config(self._base_path, [])
        self._configs: dict[str, PhalanxConfig | None] = {}
        self._workloads: dict[str, Workload | None] = {}
        self._models: dict[Path, ModelConfig] = {}
        self.problems: list[Problem] = []
        self._known: set[tuple[str, str]] = set()

    def make(self) -> list[Cell]:
        """Return all cells; empty where `problems` has any."""
        if self._base.problems:
            self.problems += [
                Problem("base", f"{self._base_path}: {problem.message}")
                for problem in self._base.problems
            ]
            return []
        all_settings = expand(self._sections.sweep)
        keys = swept_keys(all_settings)
        names = short_names(keys)
        cells = [
            self._cell(index, settings, names) for index, settings in enumerate(all_settings, 1)
        ]
        made = [cell for cell in cells if cell is not None]
        return [] if self.problems else made

    def _cell(self, index: int, settings: Settings, names: Mapping[str, str]) -> Cell | None:
        of_workload = {
            key.removeprefix(WORKLOAD): value
            for key, value in settings.items()
            if key.startswith(WORKLOAD)
        }
        of_config = {key: value for key, value in settings.items() if not key.startswith(WORKLOAD)}
        rough = ", ".join(f"{names[key]}={show(value)}" for key, value in settings.items())
        where = f"cell {index} ({rough})" if settings else "the cell"
        config = self._config(of_config, where)
        workload = self._workload(of_workload, where)
        if config is None or workload is None:
            return None
        for problem in self._together(config, workload):
            self._add(where, problem)
        tree = {**flat(config.model_dump(mode="json")), "workload": None}
        tree |= flat(workload.model_dump(mode="json"), WORKLOAD)
        values = {key: _value(tree, key, given) for key, given in settings.items()}
        name = ", ".join(f"{names[key]}={label(value)}" for key, value in values.items())
        name = name or "all settings of the base"
        engine, process = (
            engine_of(self._sections.kind, config),
            process_of(self._sections.kind, config),
        )
        return Cell(index, name, values, config, workload, engine, process)

    def _config(self, settings: Settings, where: str) -> PhalanxConfig | None:
        key = show_all(settings)
        if key not in self._configs:
            self._configs[key] = self._load_config(settings, where)
        return self._configs[key]

    def _load_config(self, settings: Settings, where: str) -> PhalanxConfig | None:
        source = ConfigSource(copy.deepcopy(self._base.data), dict(self._base.places), [])
        for name, value in {**flat(self._sections.config), **settings}.items():
            if name in PATHS and isinstance(value, str):
                value = self._path(name, value)
            put(source.data, name, copy.deepcopy(value))
        try:
            return check_source(source, str(self._base_path), self._base_path.parent)
        except ConfigError as error:
            for problem in error.problems:
                self._add(where, problem)
        return None

    def _path(self, name: str, value: str) -> str:
        """Return an absolute path; a name on the Hugging Face Hub stays as it is."""
        path = absolute(value, self._folder)
        is_name = name == "model.path" and hub.is_name(value)
        return value if is_name and not Path(path).exists() else path

    def _workload(self, settings: Settings, where: str) -> Workload | None:
        key = show_all(settings)
        if key not in self._workloads:
            self._workloads[key] = self._load_workload(settings, where)
        return self._workloads[key]

    def _load_workload(self, settings: Settings, where: str) -> Workload | None:
        model: type[RequestWorkload] | type[StepWorkload] = type(self._sections.workload)
        data = self._sections.workload.model_dump()
        for name, value in settings.items():
            put(data, name, value)
        for name in ("prompts", "trace"):
            if isinstance(data.get(name), str):
                data[name] = absolute(data[name], self._folder)
        try:
            workload = model.model_validate(data, strict=True)
        except ValidationError as error:
            for problem in from_pydantic(error, model):
                self._add(where, Problem(WORKLOAD + problem.key, problem.message))
            return None
        problems = list(workload.problems())
        for problem in problems:
            self._add(where, problem)
        return None if problems else workload

    def _together(self, config: PhalanxConfig, workload: Workload) -> Iterator[Problem]:
        kind = self._sections.kind
        if kind != "http" and config.cluster.nodes > 1:
            text = f"kind {kind} runs on one machine; use kind http for several"
            yield Problem("cluster.nodes", text)
        if kind != "http" and config.experts.rebalance != "off":
            text = f"kind {kind} has no supervisor, which plans moves of experts; use kind http"
            yield Problem("experts.rebalance", text)
        if isinstance(workload, StepWorkload):
            return
        if kind == "http":
            yield from workload.endpoint_problems()
        longest = self._max_model_len(config)
        if workload.longest > longest:
            file = "workload.trace" if workload.trace else "workload.prompts"
            text = (
                f"requests of up to {workload.longest} tokens; the configuration allows {longest}"
            )
            key = file if workload.files else "workload.input_len"
            yield Problem(key, f"{text} (model.max_model_len)")
        num_ids = self._model(config).vocab_size
        if workload.has_random_prompts and workload.vocab_size > num_ids:
            text = f"random prompts of {workload.vocab_size} token ids; the model has {num_ids}"
            yield Problem("workload.vocab_size", text)

    def _max_model_len(self, config: PhalanxConfig) -> int:
        if config.model.max_model_len != "auto":
            return config.model.max_model_len
        return self._model(config).max_position_embeddings

    def _model(self, config: PhalanxConfig) -> ModelConfig:
        path = config.model.folder
        if path not in self._models:
            self._models[path] = load_model_config(path)
        return self._models[path]

    def _add(self, where: str, problem: Problem) -> None:
        """Keep a problem with the first cell that has it."""
        seen = (problem.key, problem.message)
        if seen not in self._known:
            self._known.add(seen)
            self.problems.append(Problem(problem.key, f"{where}: {problem.message}"))


def engine_of(kind: Kind, config: PhalanxConfig) -> Engine:
    """Return the digest of the settings that an engine of this kind is started with."""
    tree = config.model_dump(mode="json")
    if kind != "http":
        del tree["serve"]
    return digest(tree)


def process_of(kind: Kind, config: PhalanxConfig) -> Engine:
    """Return the digest of the settings that a started engine cannot change: of ranks all but those of an epoch."""
    tree = config.model_dump(mode="json")
    if kind != "http":
        del tree["serve"], tree["overlap"], tree["kernels"]["all2all"], tree["model"]["routing"]
    return digest(tree)


def label(value: Any) -> str:
    """Return a swept value for tables: `2`, `on`, `{kind: zipf, s: 1.2}`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {label(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str) else show(value)


def show_all(settings: Mapping[str, Any]) -> str:
    """Return settings as a key of a dictionary."""
    return json.dumps(settings, sort_keys=True, default=str)


def place_of(problem: Problem, places: Mapping[str, str]) -> str | None:
    """Return the line of the experiment file that a problem of a cell stems from."""
    key = problem.key
    candidates: Sequence[str] = (key, f"sweep.grid.{key}", f"config.{key}")
    for candidate in candidates:
        if candidate in places:
            return places[candidate]
    section = key.rpartition(".")[0]
    return place_of(Problem(section, ""), places) if section else None


def _value(tree: Mapping[str, Any], key: str, given: Any) -> Any:
    """Return the resolved value of a swept key; a section is shown as it was given."""
    return given if isinstance(given, Mapping) else tree.get(key, given)
