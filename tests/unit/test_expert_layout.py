"""Layouts of experts as data: files, other numbers of ranks, and settings that a layout rules out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from kernels.routing.expert_map import ContiguousMap, PlacedMap
from tests.unit.model_case import small_checkpoint
from workers.models.registry import load_model_config
from workers.rank.rank_experts import RankExperts
from workers.specs.expert_layout import (
    ExpertLayout,
    ExpertReport,
    LayoutError,
    expert_groups,
    joined,
    moe_layers,
)
from workers.specs.model import MlpSpec


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "model")  # three layers of 8 experts


def layout(num_ranks: int = 2, spare: int = 1) -> ExpertLayout:
    base = ExpertLayout.of(ContiguousMap(8, num_ranks, spare), range(3))
    loads = np.random.default_rng(0).integers(0, 100, (3, 8))
    return base.with_loads(dict(enumerate(loads)))


def test_a_layout_survives_its_file(tmp_path):
    path = tmp_path / "map.json"
    layout().save(path)
    assert ExpertLayout.read(path) == layout()
    assert ExpertLayout.read(path).digest == layout().digest != layout(4).digest
    assert [it.name for it in tmp_path.iterdir()] == ["map.json"]
    found = layout().expert_map(3)
    assert isinstance(found, PlacedMap) and found.experts(2) == ContiguousMap(8, 2, 1).experts()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=7), "has format 7, expected 1"),
        (lambda data: data.pop("layers"), "is no saved map of experts: KeyError"),
        (lambda data: data["layers"]["1"].update(slots=[0] * 10), "layer 1: experts"),
        (lambda data: data.update(layers={}), "is no saved map of experts"),
        (lambda data: data.update(layers=3), "is no saved map of experts"),
    ],
)
def test_files_that_are_no_map(tmp_path, change, message):
    path = tmp_path / "map.json"
    layout().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(LayoutError, match=message):
        ExpertLayout.read(path)
    path.write_text("[")
    with pytest.raises(LayoutError, match="is no saved map of experts"):
        ExpertLayout.read(path)
    with pytest.raises(LayoutError, match="cannot be read: No such file"):
        ExpertLayout.read(tmp_path / "missing.json")


def test_other_ranks_get_a_plan_by_the_loads_and_the_same_ranks_the_same_map():
    mine = layout()
    assert mine.fitted(ExpertLayout.of(ContiguousMap(8, 2, 1), range(3))) == mine
    base = ExpertLayout.of(ContiguousMap(8, 4), range(3), hosts=2)
    other = mine.fitted(base)
    assert other.starts == (0, 2, 4, 6, 8) and other.hosts == 2
    for layer, it in other.layers.items():
        assert sorted(it.slots) == list(range(8)) and it.loads == mine.layers[layer].loads
    assert other == mine.fitted(base)
    without = ExpertLayout.of(ContiguousMap(8, 2, 1), range(3))
    assert without.fitted(base) is base, "no loads to plan by"


def test_layers_without_loads_stay():
    mine = ExpertLayout.of(ContiguousMap(8, 2, 1), range(2))
    planned = mine.with_loads({0: [0] * 8, 1: [90, 0, 0, 80, 0, 0, 0, 1]}).planned()
    assert planned.layers[0].slots == mine.layers[0].slots
    assert planned.layers[1].slots != mine.layers[1].slots


def test_the_reports_of_all_ranks_add_up_where_they_are_of_one_moment():
    base = ExpertLayout.of(ContiguousMap(3, 2, 1), [4])  # 0 1 2 and 2 0
    rows = [(10.0, 5.0, 1.0), (2.0, 30.0)]
    reports = [ExpertReport(rank, 32, base, {4: rows[rank]}) for rank in range(2)]
    whole = joined(reports)
    assert whole is not None and whole.layers[4].loads == (40, 5, 3)
    assert whole.busiest() == (20 + 5 + 1.5, 24)
    assert joined([reports[0], replace(reports[1], step=48)]) is None
    moved = base.with_slots(4, (2, 1, 0, 2, 0))
    assert joined([reports[0], replace(reports[1], layout=moved)]) is None
    assert joined(reports[:1]) is None, "a rank is missing"
    empty = joined([replace(it, rows={}) for it in reports])
    assert empty is not None and empty.busiest() == (0, 0)


def test_groups_count_where_the_router_closes_some(checkpoint):
    model = load_model_config(checkpoint)
    assert expert_groups(model) == 1 and moe_layers(model) == [0, 1, 2]
    layers = tuple(
        replace(spec, mlp=MlpSpec(intermediate_size=64, activation="silu")) if n == 0 else spec
        for n, spec in enumerate(model.layers)
    )
    assert moe_layers(replace(model, layers=layers)) == [1, 2]


def test_settings_that_the_model_or_the_file_rules_out(checkpoint, tmp_path):
    def problems(**experts: object) -> str:
        data = {"model": {"path": str(checkpoint)}, "cluster": {"ranks": 2}, "experts": experts}
        with pytest.raises(ConfigError) as error:
            load_config(data)
        return str(error.value)

    assert "experts.redundant_slots" in problems(redundant_slots=5)
    assert "expected at most 4 with 2 rank(s)" in problems(redundant_slots=5)
    assert "missing.json cannot be read" in problems(map=str(tmp_path / "missing.json"))
    path = tmp_path / "map.json"
    ExpertLayout.of(ContiguousMap(6, 2), range(3)).save(path)
    assert "it has 6 experts, the model has 8" in problems(map=str(path))
    ExpertLayout.of(ContiguousMap(8, 2), range(2)).save(path)
    assert "it has layers [0, 1], the model has experts in [0, 1, 2]" in problems(map=str(path))
    layout().save(path)
    experts = {"map": "map.json", "redundant_slots": 1}
    data = {"model": {"path": str(checkpoint)}, "cluster": {"ranks": 2}, "experts": experts}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(data))
    assert load_config(config).experts.map == str(path), "relative to the YAML's folder"


def test_a_process_takes_the_map_of_its_group_before_that_of_the_file(checkpoint, tmp_path):
    from tests.distributed.engine_harness import rank_config

    path = tmp_path / "map.json"
    layout().save(path)
    experts = RankExperts(load_model_config(checkpoint))
    config = rank_config(checkpoint, 2, experts={"map": str(path), "redundant_slots": 1})
    experts.place(config, None)
    assert experts.layout == layout() and not experts.map.is_identity
    assert experts.base == ContiguousMap(8, 2, 1)
    experts.place(config, layout().planned())
    assert experts.layout != layout()
    experts.place(rank_config(checkpoint, 3), layout())
    assert experts.map.num_ranks == 3 and experts.map.num_slots == 8
    experts.place(rank_config(checkpoint, 3), None)
    assert experts.layout is None and experts.map.is_identity
