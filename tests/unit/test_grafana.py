"""The dashboard file: complete, and every query asks for a metric and for labels that /metrics really has."""

import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.test_metrics import RANK_STATS, filled_metrics, rebuilding

PATH = Path(__file__).parents[2] / "configs" / "grafana" / "phalanx.json"
NAME = re.compile(r"phalanx:\w+")
SELECTED = re.compile(r"(phalanx:\w+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([^)]*)\) \((?:rate|increase)\((phalanx:\w+)")
LABEL = re.compile(r'(\w+)=~?"')


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(PATH.read_text())


@cache
def samples() -> dict[str, set[str]]:
    """Name of every sample that a server renders -> its labels."""
    stats = [{**RANK_STATS, "rank": rank} for rank in range(2)]
    group = {**rebuilding().to_json(), "rank_slowdowns": [1.0, 4.0], "slow_ranks": [1]}
    text = filled_metrics().render(stats, groups=[group]).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    return samples()


def panels(dashboard: dict) -> list[dict]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def test_every_query_names_metrics_and_labels_that_exist(dashboard, exported):
    queries = [item["query"]["query"] for item in dashboard["templating"]["list"][1:]]
    assert len(expressions(dashboard)) > 40 and len(queries) == 2
    for query in [*expressions(dashboard), *queries]:
        names = set(NAME.findall(query))
        assert names, query
        assert names <= exported.keys(), f"{names - exported.keys()} in {query}"
        for name, selector in SELECTED.findall(query):
            assert set(LABEL.findall(selector)) <= exported[name], query
        for labels, name in GROUPED.findall(query):
            assert set(labels.split(", ")) <= exported[name], query


def test_legends_use_labels_that_the_query_keeps(dashboard, exported):
    for panel in panels(dashboard):
        for target in panel["targets"]:
            used = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            kept = {
                label
                for labels, _ in GROUPED.findall(target["expr"])
                for label in labels.split(", ")
            } or {label for name in NAME.findall(target["expr"]) for label in exported[name]}
            assert used <= kept, target


def test_every_metric_has_a_panel(dashboard, exported):
    shown = set(NAME.findall(" ".join(expressions(dashboard))))
    for name in exported:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        forms = {name, f"{base}_bucket", f"{base}_sum", f"{base}_count"}
        assert forms & shown, f"{name} is on no panel"


def test_it_loads_without_edits(dashboard):
    """What Grafana's import needs: a uid, no id of another installation, a data source to choose."""
    assert dashboard["uid"] == "phalanx-serving" and dashboard["title"] == "Phalanx"
    assert "id" not in dashboard and "__inputs" not in dashboard
    assert dashboard["schemaVersion"] >= 36
    first = dashboard["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == (
        *("datasource", "datasource"),
        "prometheus",
    )
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels(dashboard):
        assert panel["datasource"] == chosen and panel["title"] and panel["targets"]
        assert all(target["datasource"] == chosen for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(identities) == len(set(identities))


def test_panels_do_not_overlap(dashboard):
    for one, two in combinations((panel["gridPos"] for panel in dashboard["panels"]), 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        above = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or above, (one, two)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in dashboard["panels"])
