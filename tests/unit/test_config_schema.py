"""configs/schema.json: equal to the code's, and it refuses what the loader refuses."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster.config.phalanx_config import json_schema

REPOSITORY = Path(__file__).parents[2]


def test_committed_schema_is_current() -> None:
    committed = json.loads((REPOSITORY / "configs" / "schema.json").read_text())
    assert committed == json_schema(), "run: phalanx schema > configs/schema.json"


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_committed_yaml_fits_the_schema(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(yaml.safe_load(text), json_schema())


def test_schema_refuses_what_the_loader_refuses() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    good = {"model": {"path": "a-model"}}
    assert validator.is_valid(good)
    assert validator.is_valid({**good, "serve": {"model_name": None}})
    assert not validator.is_valid({**good, "serve": {"port": 0}})
    assert not validator.is_valid({**good, "serve": {"prot": 1}})
    assert not validator.is_valid({})
