"""What README.md, docs/*.md and the comments of configs/ name is there: settings, options, metrics, routes, fields."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fastapi.routing import APIRoute
from typer.main import get_group

from cluster.cli import app
from cluster.config.changes import RESTART
from cluster.config.phalanx_config import json_schema
from cluster.experiments.experiment import load_experiment
from tests.unit.api_fakes import Api
from tests.unit.test_api_pooling import EMBED, api_of
from tests.unit.test_grafana import samples

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "scripts/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMENTED = sorted((ROOT / "configs").rglob("*.yaml"))
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
MODULES_AND_TENSORS = re.compile(r"cluster\.(app|offline)|model\.(layers\..*|safetensors)|\w+\.md")


def places(pattern: str, pages: list[Path]) -> list[tuple[str, re.Match[str]]]:
    """Page and match of each place. A line that ends with a backslash goes on in the next one."""
    texts = {page: re.sub(r"\\\n#?\s*", " ", page.read_text()) for page in pages}
    return [
        (str(page.relative_to(ROOT)), match)
        for page, text in texts.items()
        for match in re.finditer(pattern, text)
    ]


@cache
def settings() -> set[str]:
    """The dotted keys of all sections and settings."""
    schema, found = json_schema(), set()

    def walk(node: dict[str, Any], path: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for part in (*node.get("anyOf", ()), *([node["items"]] if "items" in node else ())):
            walk(part, path)
        for name, child in node.get("properties", {}).items():
            found.add(f"{path}{name}")
            walk(child, f"{path}{name}.")

    walk(schema, "")
    return found


def test_keys_are_settings() -> None:
    sections = "|".join(sorted({key.partition(".")[0] for key in settings()}))
    named = places(rf"(?<![\w./-])((?:{sections})(?:\.[a-z_0-9]+)+)(\*?)", [*PAGES, *COMMENTED])
    wrong = [
        (page, match[0])
        for page, match in named
        if match[1] not in settings()
        and not MODULES_AND_TENSORS.fullmatch(match[1])
        and not (match[2] and any(key.startswith(match[1]) for key in settings()))
    ]
    assert len(named) > 300 and not wrong


def test_yaml_is_accepted(tmp_path: Path) -> None:
    blocks = [
        (page.name, match[3])
        for page in PAGES
        for match in FENCED.finditer(page.read_text())
        if match[2] == "yaml"
    ]
    blocks += [(page, match[1]) for page, match in places(r"(?s)my\.yaml <<END\n(.*?)\nEND", PAGES)]
    assert len(blocks) >= 7
    for page, text in blocks:
        data = yaml.safe_load(text)
        if "kind" in data:
            file = tmp_path / "experiment.yaml"
            file.write_text(text.replace("../", f"{ROOT}/configs/"))
            assert load_experiment(file).cells, page
        else:
            jsonschema.validate({"model": {"path": "x"}} | data, json_schema())


def test_options_are_those_of_the_commands() -> None:
    commands: dict[str, Any] = get_group(app).commands
    options = {
        name: {text for part in command.params for text in (*part.opts, *part.secondary_opts)}
        for name, command in commands.items()
    }
    named = places(r"(?<![\w/:.-])(?:\.venv/bin/)?phalanx ([a-z]+)([^\n`|;]*)", PAGES + COMMENTED)
    named = [(page, match) for page, match in named if match[1] in commands]
    wrong = [
        (page, match[1], option)
        for page, match in named
        for option in re.findall(r"(?<!\S)--[a-z0-9-]+", match[2])
        if option not in options[match[1]]
    ]
    assert len(named) > 100 and not wrong
    assert not [
        (page, match[0])
        for page, match in places(r"`phalanx ([a-z]+)", PAGES)
        if match[1] not in commands
    ]


def test_metrics_are_exported() -> None:
    exported = set(samples())
    named = places(r"phalanx:([a-z]\w*)(\*?)", PAGES)
    wrong = [
        (page, match[0])
        for page, match in named
        if f"phalanx:{match[1]}" not in exported
        and not (match[2] and any(name.startswith(f"phalanx:{match[1]}") for name in exported))
    ]
    assert len(named) > 20 and not wrong


@cache
def routes() -> set[tuple[str, str]]:
    """Method and path of each route, parameters as `{}`."""
    return {
        (method, re.sub(r"{[^}]*}", "{}", route.path))
        for route in [*Api().app.routes, *api_of(EMBED).app.routes]
        if isinstance(route, APIRoute)
        for method in route.methods
    } | {("GET", "/openapi.json")}


def test_routes_are_served() -> None:
    named = places(r"`(GET|POST|DELETE)(?:`, `(?:GET|POST|DELETE))? (/[\w/{}.]*)", PAGES)
    wrong = [
        (page, match[0])
        for page, match in named
        if (match[1], re.sub(r"{[^}]*}", "{}", match[2])) not in routes()
    ]
    assert len(named) > 30 and not wrong


@cache
def fields(*paths: str) -> set[str]:
    """The fields of the bodies, and the fields of their objects."""
    document = Api().get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    found: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                walk(schemas[node["$ref"].rpartition("/")[2]])
            properties = node.get("properties", {})
            found.update(properties)
            for child in (*properties.values(), *node.get("anyOf", ()), node.get("items")):
                walk(child)

    for path in paths:
        walk(
            document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        )
    return found


@pytest.mark.parametrize(
    ("heading", "column", "paths"),
    [
        ("Fields of both kinds of request", 1, ("/v1/completions", "/v1/chat/completions")),
        ("Responses", 0, ("/v1/responses",)),
        ("Anthropic's messages", 0, ("/v1/messages",)),
    ],
)
def test_fields_are_read(heading: str, column: int, paths: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / "api.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    # vLLM's fields stand in the second column of their row.
    cells = [row[1] if "vLLM's" in row[0] else row[column] for row in rows]
    names = [name for cell in cells for name in re.findall(r"`([a-z_.]+)`", cell)]
    # Of parts of messages and of `thinking`, which the document does not describe.
    outside = {"cache_control", "is_error", "tool_result", "budget_tokens"}
    missing = [name for name in names if not {*name.split(".")} - outside <= fields(*paths)]
    assert len(names) > 10 and not missing


def test_the_settings_of_a_restart_are_complete() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| `phalanx restart")]
    named = set(re.findall(r"`([a-z_.]+)`", row))
    of_sections = {key for key in RESTART if key.partition(".")[0] in ("cache", "kernels")}
    assert {*RESTART} - of_sections == {name for name in named if name in RESTART}
