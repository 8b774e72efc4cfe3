"""A name stands for an example, unless there is a file of that name."""

from pathlib import Path

import pytest

from cluster.config import examples
from cluster.config.errors import ConfigError
from cluster.config.load import load_config


@pytest.mark.parametrize("name", ["gpu-bench", "gpu-bench.yaml"])
def test_a_configuration_is_found_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(load_config(name).model.path) == examples.CONFIGS / "models" / "qwen3-30b-a3b"
    (tmp_path / name).write_text(f"model: {{path: {examples.CONFIGS}/models/demo}}")
    assert Path(load_config(name).model.path).name == "demo"


def test_an_unknown_name_lists_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = "no such file, and no example; the examples are deepep-deepgemm, gpu-bench, local"
    with pytest.raises(ConfigError, match=expected):
        load_config("gpubench.yaml")
    with pytest.raises(ConfigError, match="no such file; expected a YAML"):
        load_config("configs/gpu-bench.yaml")
