"""What `phalanx check` reports of checkpoints in four bits, and its refusal of weights that are larger than a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.commands import check_memory
from cluster.commands.check import CheckReport, check
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from tests.checkpoints.four_bit import FOUR_BITS
from tests.checkpoints.writer import make_checkpoint

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 512,
    "num_experts": 8,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "weights": False,
}


def checked(folder: Path, *overrides: str, device: str = "cuda") -> CheckReport:
    yaml = folder / "config.yaml"
    yaml.write_text("model: {path: tiny, weights: dummy, dtype: bfloat16}\n")
    return check(load_config(yaml, [f"cluster.device={device}", *overrides]), num_api_keys=0)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "tiny", quantization="gptq", **SHAPE)
    return tmp_path


@pytest.mark.parametrize(
    ("device", "name"), [("cuda", "triton_four_bit"), ("cpu", "native_four_bit")]
)
def test_auto_keeps_four_bits_and_names_the_format(packed: Path, device: str, name: str) -> None:
    report = checked(packed, device=device)
    chosen = report.backends["grouped_gemm"]
    assert chosen["name"] == name and "(int4, groups of 32)" in chosen["reason"]
    assert not [warning for warning in report.warnings if "four bits" in warning]


def test_widening_is_named_with_its_reason(packed: Path) -> None:
    kept, wide = checked(packed), checked(packed, "kernels.grouped_gemm=triton")
    (warning,) = [warning for warning in wide.warnings if "four bits" in warning]
    assert "in four bits (int4, groups of 32)" in warning
    assert "kernels.grouped_gemm triton widens them to model.dtype; triton_four_bit does" in warning
    assert wide.ranks[0].weight_bytes > 2 * kept.ranks[0].weight_bytes


def test_widths_that_no_kernel_takes_are_named(tmp_path: Path) -> None:
    shape = SHAPE | {"moe_intermediate_size": 96}
    make_checkpoint(tmp_path / "tiny", quantization="gptq", **shape)
    (warning,) = [warning for warning in checked(tmp_path).warnings if "four bits" in warning]
    assert "multiple of 64, the expert width is 96" in warning


def test_projections_that_are_widened_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", quantization="awq", **SHAPE | {"head_dim": 16})
    (warning,) = [warning for warning in checked(tmp_path).warnings if "four bits" in warning]
    assert warning.startswith("6 projections") and "self_attn.q_proj" in warning


def test_four_bit_backends_refuse_other_checkpoints(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", **SHAPE)
    with pytest.raises(ValueError, match="does not store all experts in four bits in one format"):
        checked(tmp_path, "kernels.grouped_gemm=triton_four_bit")


def test_what_cannot_fit_is_refused_with_settings_that_check_accepts(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checked(packed).ranks[0].weight_bytes
    wide = checked(packed, "kernels.grouped_gemm=triton").ranks[0].weight_bytes
    room = (kept + wide) // 2
    monkeypatch.setattr(check_memory, "gpu_bytes", lambda: int(room / 0.9))
    settings = ["cache.memory_fraction=0.9", "kernels.grouped_gemm=triton"]
    with pytest.raises(ConfigError) as caught:
        checked(packed, *settings)
    advice = re.findall(r"([a-z_.]+): (\w+) \(", str(caught.value))
    assert ("kernels.grouped_gemm", "triton_four_bit") in advice
    assert "cluster.ranks" in dict(advice)
    for key, value in advice:
        assert checked(packed, *settings, f"{key}={value}").ranks[0].weight_bytes < room
    monkeypatch.setattr(check_memory, "gpu_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="No number of ranks and no backend here fits"):
        checked(packed)


def test_every_form_is_read_by_check(tmp_path: Path) -> None:
    for form in FOUR_BITS:
        make_checkpoint(tmp_path / "tiny", quantization=form, **SHAPE)
        assert checked(tmp_path).backends["grouped_gemm"]["name"] == "triton_four_bit", form
