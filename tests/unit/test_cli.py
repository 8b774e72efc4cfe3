"""The `phalanx` command: output, messages and exit codes. Serving itself is tested in tests/serve."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.commands import check as checking
from cluster.config.load import load_config
from cluster.config.phalanx_config import json_schema
from tests.checkpoints.writer import make_checkpoint
from tests.serve.server import free_port

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def yaml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_checkpoint(folder / "tiny", num_layers=1, hidden_size=32, num_experts=5)
    path = folder / "config.yaml"
    path.write_text("model: {path: tiny}\ncluster: {ranks: 2, device: cpu}\n")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def check_json(path: Path, *overrides: str) -> dict[str, Any]:
    options = [part for override in overrides for part in ("--set", override)]
    result = run("check", path, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, cluster.cli as cli\n"
        "try:\n    cli.app(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'fastapi'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for command in ("serve", "check", "trace", "bench", "schema"):
        assert command in done.stdout


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("phalanx ")


def test_schema_prints_the_committed_schema() -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json_schema()


@pytest.mark.parametrize("command", ["serve", "check"])
def test_wrong_configuration_is_one_message(command: str, yaml_path: Path) -> None:
    result = run(command, yaml_path, "--set", "serve.prot=1", "--set", "cluster.ranks=0")
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert result.stderr.startswith(f"error: {yaml_path}: 2 problems\n")
    assert "did you mean serve.port?" in result.stderr
    assert "cluster.ranks: 0 is not allowed" in result.stderr


def test_missing_file(tmp_path: Path) -> None:
    result = run("check", tmp_path / "absent.yaml")
    assert result.exit_code == 2
    assert "no such file" in result.stderr


def test_a_model_in_the_place_of_a_yaml_is_refused_with_its_setting(yaml_path: Path) -> None:
    model = load_config(yaml_path).model.path
    for path in (model, "Qwen/Qwen3-30B-A3B"):
        result = run("check", path)
        assert result.exit_code == 2
        assert f"--set model.path={path} serves a model" in result.stderr
    assert "no such file" in run("check", "configs/absent.yaml").stderr


def test_a_batch_without_a_yaml_runs_the_demo(tmp_path: Path) -> None:
    files = ("--input", tmp_path / "absent.jsonl", "--output", tmp_path / "results.jsonl")
    assert "absent.jsonl: no such file" in run("batch", *files).stderr


def test_check_refuses_a_backend_that_cannot_run(
    yaml_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable = {"grouped_gemm.torch_grouped": "this torch has no grouped_mm"}
    monkeypatch.setattr(checking.select, "probe", lambda device: unavailable)
    result = run("check", yaml_path, "--set", "kernels.grouped_gemm=torch_grouped")
    assert result.exit_code == 2
    assert "kernels.grouped_gemm" in result.stderr
    assert "this torch has no grouped_mm" in result.stderr


def test_check_resolves_everything(yaml_path: Path) -> None:
    report = check_json(yaml_path, "cluster.ranks=2")
    assert report["config"]["model"]["dtype"] == "float32"
    assert report["config"]["model"]["max_model_len"] == 4096
    assert isinstance(report["config"]["cache"]["num_blocks"], int)
    assert report["config"]["cluster"]["threads_per_rank"] >= 1
    assert report["config"]["serve"]["model_name"] == "tiny"
    assert report["backends"].keys() == {"all2all", "grouped_gemm", "attention"}
    assert all(choice["reason"] for choice in report["backends"].values())
    assert report["backends"]["all2all"]["name"] != "local"
    first, second = report["ranks"]
    assert (first["experts"], second["experts"]) == ("0-2", "3-4")
    one_expert = 3 * 32 * 64 * 4
    assert first["weight_bytes"] - second["weight_bytes"] == one_expert
    assert first["kv_bytes"] == report["config"]["cache"]["num_blocks"] * 2 * 16 * 2 * 64 * 4
    assert first["buffer_bytes"] > 0


def test_check_places_ranks_by_node_and_device(yaml_path: Path) -> None:
    report = check_json(
        yaml_path,
        "cluster.ranks=6",
        "cluster.nodes=2",
        "cluster.ray_address=auto",
        "cluster.device=cuda",
        "model.dtype=bfloat16",
    )
    places = [(row["rank"], row["node"], row["device"]) for row in report["ranks"]]
    assert places == [(rank, rank // 3, f"cuda:{rank % 3}") for rank in range(6)]
    assert any("1 rank(s) hold none" in warning for warning in report["warnings"])
    assert report["ranks"][5]["experts"] == "none"


def test_check_for_people(yaml_path: Path) -> None:
    result = run(
        "check", yaml_path, "--set", "serve.host=0.0.0.0", "--set", "serve.model_name='[red]x'"
    )
    assert result.exit_code == 0
    assert "[red]x" in result.stdout, "what a user wrote is not taken for markup"
    for words in ("max_num_batched_tokens", "grouped_gemm", "rank  node", "0-2", "warning: serve"):
        assert words in result.stdout


def test_check_warns_of_missing_gpus(yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(checking.torch.cuda, "is_available", lambda: False)
    settings = load_config(yaml_path, ["cluster.device=cuda", "model.dtype=bfloat16"])
    report = checking.check(settings)
    assert any("this machine has 1 GPU(s)" in warning for warning in report.warnings)
    assert report.ranks[0].kv_bytes is None
    assert "compute capability 9.0" in report.assumed
    row = report.ranks[0]
    assert 0 < row.graph_bytes < row.buffer_bytes, "a graph holds no exchange"
    off = checking.check(
        load_config(
            yaml_path,
            ["cluster.device=cuda", "model.dtype=bfloat16", "scheduler.cuda_graphs=false"],
        )
    )
    assert off.ranks[0].graph_bytes == 0


def test_check_says_why_other_backends_cannot_run(
    yaml_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable = {"grouped_gemm.native": "no C compiler was found"}
    monkeypatch.setattr(checking.select, "probe", lambda device: unavailable)
    report = checking.check(load_config(yaml_path, ["cluster.device=cpu", "cluster.ranks=2"]))
    assert not report.assumed
    assert report.alternatives["grouped_gemm"]["native"] == "no C compiler was found"
    assert report.alternatives["grouped_gemm"]["reference"] == ""
    assert "serves one rank" in report.alternatives["all2all"]["local"]
    for family, names in report.alternatives.items():
        assert report.backends[family]["name"] not in names
    shown = run("check", yaml_path).stdout
    assert "no C compiler was found" in shown and "could run" in shown


def test_check_warns_of_too_little_memory(yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_config(yaml_path, ["cache.cpu_memory_gib=2"])
    monkeypatch.setattr(checking, "available_memory", lambda: 4 * 2**30)
    assert any("lower cache.cpu_memory_gib" in text for text in checking.check(settings).warnings)
    monkeypatch.setattr(checking, "available_memory", lambda: 8 * 2**30)
    assert not checking.check(settings).warnings


def test_check_warns_of_meaningless_answers(yaml_path: Path) -> None:
    settings = ["model.weights=dummy", "model.routing.kind=zipf", "model.routing.s=1.5"]
    warnings = " ".join(checking.check(load_config(yaml_path, settings)).warnings)
    assert "model.weights is dummy" in warnings
    assert "model.routing.kind is zipf: zipf with s = 1.5" in warnings
    assert "answers" not in " ".join(checking.check(load_config(yaml_path)).warnings)


def test_check_warns_of_the_other_kernels(yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checking.foreign_kernels_version() is None
    monkeypatch.setattr(checking.importlib.metadata, "version", lambda name: f"{name} 0.9")
    warnings = checking.check(load_config(yaml_path)).warnings
    assert any("'kernels' kernels 0.9" in warning for warning in warnings)


def test_serve_says_when_the_server_fails(yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.commands import serve
    from cluster.commands.start import ServerError

    seen = []

    def fail(config: Any) -> None:
        seen.append(config)
        raise ServerError("port 8000 is taken")

    monkeypatch.setattr(serve, "run_server", fail)
    result = run("serve", yaml_path, "--set", "serve.port=1234")
    assert result.exit_code == 1
    assert "error: port 8000 is taken" in result.stderr
    assert seen[0].serve.port == 1234


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "cannot start a local Ray: the raylet is slow"),
        (["--set", "cluster.ray_address=auto"], "cannot join Ray at auto: the raylet is slow"),
    ],
)
def test_serve_says_when_ray_does_not_start(
    yaml_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], says: str
) -> None:
    import ray

    from cluster.commands import serve

    def fail(*_: Any, **__: Any) -> None:
        raise Exception("the raylet is slow")

    monkeypatch.setattr(ray, "init", fail)
    # What a server changes in its process would stay for the tests after this one.
    monkeypatch.setattr(serve, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(serve.StopSignals, "install", lambda self: None)
    result = run("serve", yaml_path, "--set", f"serve.port={free_port()}", *settings)
    assert result.exit_code == 1
    assert f"error: {says}" in " ".join(result.stderr.split())
