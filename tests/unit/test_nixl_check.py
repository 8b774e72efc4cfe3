"""What `phalanx check` and a rank say where NIXL is installed in its version, in another one, or not at all."""

import json
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.checkpoints.writer import make_checkpoint
from workers.kv_transfer import nixl_memory
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.nixl_fetcher import NixlFetcher

INSTALL = "the extra nixl installs it: `pip install 'phalanx[nixl]'` on every node"
UNFIT = [
    (None, f"cache.transfer is nixl, but nixl-cu12 is not installed; {INSTALL}"),
    (
        "1.4.0",
        f"cache.transfer is nixl, but nixl-cu12 1.4.0 is installed, 1.5.1 is needed; {INSTALL}",
    ),
]


@pytest.fixture(scope="module")
def yaml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nixl")
    checkpoint = make_checkpoint(folder / "tiny", num_layers=1, hidden_size=32, num_experts=4)
    path = folder / "config.yaml"
    path.write_text(
        f"model: {{path: {checkpoint}}}\ncluster: {{device: cpu}}\ncache: {{host_memory_gib: 0.1}}\n",
        encoding="utf-8",
    )
    return path


def installed(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """Let NIXL be installed in a version; None = not at all."""

    def version(name: str) -> str:
        assert name == "nixl-cu12"
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(nixl_memory, "version", version)


def check(yaml_path: Path, transfer: str) -> tuple[dict[str, str], list[str]]:
    """The lines about KV outside the devices, and the warnings."""
    result = CliRunner().invoke(
        app, ["check", str(yaml_path), "--json", "--set", f"cache.transfer={transfer}"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    return report["tiers"], [text for text in report["warnings"] if "nixl" in text]


def test_it_is_installed(yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.5.1")
    tiers, warnings = check(yaml_path, "nixl")
    assert tiers["transfer"] == "nixl 1.5.1" and not warnings
    assert nixl_memory.nixl_unavailable() is None


@pytest.mark.parametrize(("found", "message"), UNFIT, ids=["missing", "other version"])
def test_it_cannot_work(
    yaml_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, message: str
) -> None:
    installed(monkeypatch, found)
    tiers, warnings = check(yaml_path, "nixl")
    assert tiers["transfer"] == "nixl cannot run here"
    assert warnings == [f"{message}; ranks do not start without it"]
    with pytest.raises(ValueError) as refused:
        NixlFetcher(KeeperConfig("x", 0, (0, 0)), "127.0.0.1", {})
    assert str(refused.value) == f"{message}, or set cache.transfer: off"


def test_without_the_setting_it_is_not_needed(
    yaml_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, None)
    tiers, warnings = check(yaml_path, "off")
    assert "transfer" not in tiers and not warnings


def test_the_version_is_that_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (needed,) = project["optional-dependencies"]["nixl"]
    assert needed.split(";")[0] == f"{nixl_memory.DISTRIBUTION}=={nixl_memory.VERSION}"
