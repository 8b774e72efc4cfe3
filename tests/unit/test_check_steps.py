"""What `phalanx check` says of graphs and ubatches, and the memory of ubatches, for GPUs that are not here."""

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands import check_memory, check_steps
from cluster.commands.check import CheckReport, check, render
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from tests.checkpoints.writer import QUANTIZATIONS, make_checkpoint
from workers.runner.graph_sizes import GraphsUnavailableError

GPUS = ["cluster.device=cuda", "cluster.ranks=2", "model.dtype=bfloat16"]


@pytest.fixture(scope="module")
def yaml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check-steps")
    make_checkpoint(folder / "tiny", num_layers=1, hidden_size=2048, num_experts=4, weights=False)
    path = folder / "config.yaml"
    path.write_text("model: {path: tiny, weights: dummy}\n")
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_steps.torch.cuda, "is_available", lambda: False)


def checked(path: Path, *overrides: str) -> CheckReport:
    return check(load_config(path, [*GPUS, *overrides]), num_api_keys=0)


def test_graphs_with_their_sizes(yaml_path: Path) -> None:
    report = checked(yaml_path, "scheduler.max_num_seqs=8", "scheduler.max_num_batched_tokens=64")
    says = report.steps["cuda_graphs"]
    assert says.startswith("on: up to 8 decodes") and "of up to 64 tokens" in says
    assert report.ranks[0].graph_bytes > 0


def test_graphs_of_configured_sizes(yaml_path: Path) -> None:
    report = checked(yaml_path, "scheduler.max_num_seqs=8", "scheduler.cuda_graph_sizes=[1,4]")
    says = report.steps["cuda_graphs"]
    assert says == "on: up to 4 decodes (2 sizes) and steps of up to 4 tokens (2 sizes)"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("scheduler.cuda_graphs=false", "scheduler.cuda_graphs is false"),
        ("kernels.attention=sdpa", "kernels.attention is sdpa, and its steps cannot be captured"),
        ("kernels.all2all=torch_dist", "kernels.all2all is torch_dist, and its steps cannot be"),
        ("cluster.device=cpu", "cluster.device is cpu"),
    ],
)
def test_no_graphs_and_why(yaml_path: Path, override: str, reason: str) -> None:
    report = checked(yaml_path, override)
    assert report.steps["cuda_graphs"].startswith(f"off: {reason}")
    assert report.ranks[0].graph_bytes == 0
    warned = any("no CUDA graphs: " in warning for warning in report.warnings)
    assert warned == override.startswith("kernels."), "where it was not asked for"


def test_graphs_that_are_demanded_and_cannot_be(yaml_path: Path) -> None:
    demanded = ["scheduler.cuda_graphs=true", "kernels.attention=sdpa"]
    with pytest.raises(GraphsUnavailableError, match=r"kernels.attention is sdpa"):
        checked(yaml_path, *demanded)
    options = [part for text in [*GPUS, *demanded] for part in ("--set", text)]
    result = CliRunner().invoke(app, ["check", str(yaml_path), *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: scheduler.cuda_graphs is true, but kernels.attention")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["overlap.mode=off"], "overlap.mode is off"),
        (["cluster.ranks=1"], "nothing to gain with local: one rank"),
        (["cluster.device=cpu", "kernels.all2all=shm"], "nothing to gain with shm: the cores"),
    ],
)
def test_no_microbatches_and_why(yaml_path: Path, overrides: list[str], reason: str) -> None:
    report = checked(yaml_path, *overrides)
    assert report.steps["ubatches"].startswith(f"off: {reason}")
    assert set(report.steps) == {"cuda_graphs", "ubatches", "cascade", "speculation"}
    assert report.ranks[0].ubatch_bytes == 0


def test_what_is_measured(yaml_path: Path) -> None:
    steps = checked(yaml_path, "kernels.all2all=symm").steps
    for key in ("decode", "prefill", "comm_sms"):
        assert steps[key].startswith("measured at the start: ")
    assert steps["comm_sms"].endswith("no limit or 8, 16, 32")


def test_what_the_configuration_fixes(yaml_path: Path) -> None:
    report = checked(
        yaml_path,
        "kernels.all2all=symm",
        "overlap.num_ubatches=3",
        "overlap.min_decode_tokens=64",
        "overlap.comm_sms=16",
    )
    assert report.steps["ubatches"] == "3 ubatches in each step that is cut"
    assert report.steps["decode"] == "from 64 sequences of a rank on (overlap.min_decode_tokens)"
    assert report.steps["prefill"].startswith("measured at the start")
    assert report.steps["comm_sms"] == "16 (overlap.comm_sms)"
    assert "from 2 tokens of a rank on" in checked(yaml_path, "overlap.mode=on").steps["prefill"]


def test_a_limit_that_the_exchange_ignores(yaml_path: Path) -> None:
    steps = checked(yaml_path, "kernels.all2all=copy_engine", "overlap.comm_sms=16").steps
    assert steps["comm_sms"] == "no limit: copy_engine takes none, overlap.comm_sms is ignored"


def test_a_limit_that_leaves_nothing(yaml_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(yaml_path, [*GPUS, "overlap.comm_sms=132"])
    selection = check_steps.Selection(
        *(type("", (), {"name": name}) for name in ("symm", "triton", "flashinfer"))
    )
    check_steps.check_comm_sms(config.overlap, selection, 2)
    cuda = check_steps.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    properties = type("", (), {"multi_processor_count": 132})
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ConfigError, match=r"overlap.comm_sms: 132 leaves none of .* 132 multi"):
        check_steps.check_comm_sms(config.overlap, selection, 2)
    check_steps.check_comm_sms(config.overlap, selection, 0)


def test_warns_of_thresholds_that_no_step_reaches(yaml_path: Path) -> None:
    thresholds = ["overlap.min_decode_tokens=9", "overlap.min_prefill_tokens=65"]
    limits = ["scheduler.max_num_seqs=8", "scheduler.max_num_batched_tokens=64"]
    warnings = " ".join(checked(yaml_path, *thresholds, *limits).warnings)
    assert "overlap.min_decode_tokens is 9, but scheduler.max_num_seqs is 8" in warnings
    assert "min_prefill_tokens is 65, but scheduler.max_num_batched_tokens is 64" in warnings
    assert "min_" not in " ".join(checked(yaml_path, *thresholds).warnings)
    off = checked(yaml_path, *thresholds, *limits, "overlap.mode=off")
    assert "min_" not in " ".join(off.warnings)


def test_each_setting_stands_apart_from_its_value(yaml_path: Path) -> None:
    console = Console(record=True, width=160)
    render(checked(yaml_path), console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["max_prefill_tokens_with_decodes", "auto"] in lines


def test_memory_of_ubatches(yaml_path: Path) -> None:
    auto, off = checked(yaml_path), checked(yaml_path, "overlap.mode=off")
    row = auto.ranks[0]
    assert row.ubatch_bytes > 2 * 128 * 2**20, "a workspace for each, and half of the rows"
    assert row.fixed_bytes == off.ranks[0].fixed_bytes + row.ubatch_bytes


def test_low_latency_says_which_key_to_set_to_what(yaml_path: Path) -> None:
    named = [*GPUS, "kernels.all2all=deepep_low_latency"]
    options = [part for text in named for part in ("--set", text)]
    result = CliRunner().invoke(app, ["check", str(yaml_path), *options])
    assert result.exit_code == 2
    for words in (
        "kernels.all2all: 'deepep_low_latency'",
        "max_num_batched_tokens is 8192",
        "1024",
    ):
        assert words in result.stderr
    enough = check(load_config(yaml_path, [*named, "scheduler.max_num_batched_tokens=1024"]), 0)
    assert enough.backends["all2all"]["name"] == "deepep_low_latency"
    assert enough.backends["grouped_gemm"]["name"] == "deepgemm"


@pytest.mark.parametrize(
    ("gigabytes", "overrides", "says"),
    [
        (1000, [], None),
        (1000, ["cache.num_blocks=4096"], None),
        (0.5, [], "leaves nothing for the KV cache of the 450.0 MB that cache.memory_fraction 0.9"),
        (
            0.5,
            ["cache.num_blocks=4096"],
            "cache.num_blocks 4096 takes .*: more than the 500.0 MB of its",
        ),
        (
            10,
            ["cache.num_blocks=10000000"],
            "10000000 takes .*: more than the 10.0 GB of its GPU.* or lower cache",
        ),
    ],
)
def test_warns_of_gpus_too_small(
    yaml_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gigabytes: float,
    overrides: list[str],
    says: str | None,
) -> None:
    monkeypatch.setattr(check_memory, "gpu_bytes", lambda: int(gigabytes * 10**9))
    report = checked(yaml_path, "cache.memory_fraction=0.9", *overrides)
    found = [warning for warning in report.warnings if warning.startswith("rank 0 needs")]
    assert len(found) == (says is not None)
    if says is not None:
        assert re.search(says, found[0]) and "cluster.ranks" in found[0], found


def test_nothing_is_known_of_gpus_that_are_not_here(yaml_path: Path) -> None:
    report = checked(yaml_path, "cache.num_blocks=1000000")
    assert not any("for weights" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("quantization", "backend", "says"),
    [
        ("compressed-channel", "auto", "triton holds them in model.dtype"),
        ("compressed-channel", "deepgemm_fp8", "deepgemm_fp8 rounds them once more"),
        ("compressed-block", "auto", None),
    ],
)
def test_warns_of_fp8_experts_that_are_not_kept(
    tmp_path: Path, quantization: str, backend: str, says: str | None
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_layers": 1}
    make_checkpoint(tmp_path / "tiny", quantization=quantization, weights=False, **sizes)
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: tiny, weights: dummy}\n")
    report = checked(path, f"kernels.grouped_gemm={backend}")
    found = [warning for warning in report.warnings if "in FP8 with one scale a row" in warning]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


@pytest.mark.parametrize(("backend", "warned"), [("deepgemm_fp8", True), ("triton", False)])
def test_warns_of_projections_that_fp8_products_cannot_take(
    tmp_path: Path, backend: str, warned: bool
) -> None:
    """q, k and v of a layer are one product, and v alone is not in FP8."""
    sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "num_layers": 2}
    stored = QUANTIZATIONS["fp8"] | {
        "modules_to_not_convert": ["lm_head", "layers.1.self_attn.v_proj"]
    }
    sizes |= {"head_dim": 64, "quantization_config": stored}
    make_checkpoint(tmp_path / "tiny", weights=False, **sizes)
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: tiny, weights: dummy}\n")
    warnings = checked(path, f"kernels.grouped_gemm={backend}").warnings
    found = [warning for warning in warnings if "such as layers.1.attention.qkv.weight" in warning]
    assert len(found) == warned
