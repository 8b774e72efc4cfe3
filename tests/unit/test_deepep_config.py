"""configs/deepep-deepgemm.yaml: DeepEP overlapped with DeepGEMM, or an error that names what is missing."""

from pathlib import Path

import pytest

from cluster.commands import check as check_module
from cluster.commands.check import check
from cluster.commands.check_backends import ASSUMED
from cluster.config.load import load_config
from kernels.all2all import deepep_package
from kernels.backends import select
from kernels.backends.select import BackendChoiceError
from kernels.grouped_gemm import deepgemm_package

CONFIG = Path(__file__).parents[2] / "configs" / "deepep-deepgemm.yaml"


def checked(*overrides: str) -> check_module.CheckReport:
    return check(load_config(CONFIG, list(overrides)), num_api_keys=0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_is_the_pair_with_ubatches_and_rows_in_fp8(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(check_module, "probe_or_assume", lambda device: ({}, ASSUMED))
    report = checked(f"cluster.ranks={ranks}")
    names = {seam: choice["name"] for seam, choice in report.backends.items()}
    assert names["all2all"] == "deepep" and names["grouped_gemm"] == "deepgemm_fp8"
    choices = [select.Choice(names[seam], "") for seam in ("all2all", "grouped_gemm", "attention")]
    assert select.Selection(*choices).fp8_rows
    assert report.steps["cuda_graphs"].startswith("on")
    assert report.steps["prefill"].startswith("measured at the start")
    assert "8, 16, 20, 24, 32" in report.steps["comm_sms"]
    limited = checked(f"cluster.ranks={ranks}", "overlap.comm_sms=41")
    shown = "32 (overlap.comm_sms is 41, deepep takes 32 of them)"
    assert limited.steps["comm_sms"] == shown


def test_two_hosts_have_both_modes_and_graphs_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "probe_or_assume", lambda device: ({}, ASSUMED))
    hosts = ["cluster.nodes=2", "cluster.ranks=16", "cluster.ray_address=auto"]
    report = checked(*hosts, "kernels.all2all=deepep_hosts", "scheduler.max_num_seqs=200")
    names = {seam: choice["name"] for seam, choice in report.backends.items()}
    assert names["all2all"] == "deepep_hosts" and names["grouped_gemm"] == "deepgemm_fp8"
    assert "up to 200 decodes" in report.steps["cuda_graphs"]
    assert "steps of up to 200 tokens" in report.steps["cuda_graphs"]
    assert "cluster.nodes is 2" in report.alternatives["all2all"]["deepep"]


@pytest.mark.parametrize(
    ("missing", "key", "says"),
    [
        ("deep_ep", "kernels.all2all: 'deepep'", "deep_ep is not installed, 1.2.1 or newer"),
        ("deep_gemm", "kernels.grouped_gemm: 'deepgemm_fp8'", "deep_gemm is not installed"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, key: str, says: str
) -> None:
    """Hopper without one of the packages; the reasons are those that a start would find."""
    monkeypatch.setattr(deepep_package, "find_spec", lambda name: None)
    monkeypatch.setattr(deepgemm_package, "find_spec", lambda name: None)
    deepep_package.deep_ep_unavailable.cache_clear()
    deepgemm_package.package_unavailable.cache_clear()
    reasons = {
        "deep_ep": ("all2all.deepep", deepep_package.deep_ep_unavailable()),
        "deep_gemm": ("grouped_gemm.deepgemm_fp8", deepgemm_package.package_unavailable()),
    }
    deepep_package.deep_ep_unavailable.cache_clear()
    deepgemm_package.package_unavailable.cache_clear()
    monkeypatch.setattr(
        check_module, "probe_or_assume", lambda device: (dict([reasons[missing]]), "")
    )
    with pytest.raises(BackendChoiceError) as error:
        checked()
    assert str(error.value).startswith(f"{key} cannot run here: {says}")
    assert "What works: auto" in str(error.value)


def test_other_hardware_is_refused_by_number() -> None:
    with pytest.raises(BackendChoiceError, match=r"2, 4 or 8 ranks .* cluster\.ranks is 3"):
        checked("cluster.ranks=3")
