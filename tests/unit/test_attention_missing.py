"""flashinfer that is installed and does not load is as good as missing, and says why; so do a check and a start."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.commands import check as checking
from cluster.config.examples import CONFIGS
from cluster.config.load import load_config
from kernels.attention import flashinfer, flashinfer_modules
from kernels.backends import select
from kernels.host.cuda_environment import add_own_programs
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from workers.rank.backend_choice import slow_attention


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Make one of this source, on a machine that has all else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(flashinfer, "version", lambda name: "0.6.6")
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # importing it adds a folder
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    flashinfer_modules.import_failure.cache_clear()

    def write(source: str) -> None:
        (tmp_path / "flashinfer.py").write_text(source)

    yield write
    sys.modules.pop("flashinfer", None)
    flashinfer_modules.import_failure.cache_clear()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open\\nmore of it')",
            "libcudart.so.12: cannot open",
        ),
        (
            "raise RuntimeError('flashinfer-cubin 0.6.4 does not match')",
            "flashinfer-cubin 0.6.4 does",
        ),
        ("assert False", "AssertionError"),
    ],
)
def test_what_does_not_load_is_missing(package, source: str, says: str) -> None:
    package(source)
    reason = str(flashinfer.FlashInferAttention.unavailable(torch.device("cuda")))
    assert reason.startswith(
        f"import flashinfer failed (flashinfer-python 0.6.6 is installed, 0.6.6 or newer is needed): {says}"
    )
    assert "more of it" not in reason


def test_what_loads_is_there(package) -> None:
    package("")
    assert flashinfer.FlashInferAttention.unavailable(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("absent", "version"), [("tvm_ffi", "apache-tvm-ffi from 0.1.6"), ("triton", "triton 3.4 or")]
)
def test_packages_beside_it_are_named_with_versions(
    package, monkeypatch: pytest.MonkeyPatch, absent: str, version: str
) -> None:
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: None if name == absent else name)
    reason = str(flashinfer.FlashInferAttention.unavailable(torch.device("cuda")))
    assert reason.startswith(f"{absent} is not installed; needed is {version}")


NO_NVCC = "no nvcc was found to compile its kernels with"
HEADS = AttentionSpec(4, 2, 128, 1.0)
GPU = BackendShape(
    device="cuda",
    dtype=torch.bfloat16,
    num_ranks=1,
    hidden_size=128,
    moe_intermediate_size=64,
    num_experts=4,
    top_k=2,
    max_num_tokens=16,
    attention_specs=(HEADS,),
)
WITHOUT = dict.fromkeys(
    (f"attention.flashinfer{kind}" for kind in ("", "_fp8", "_latent")), NO_NVCC
)


def warnings(shape: BackendShape = GPU, unavailable: Any = WITHOUT, **named: str) -> list[str]:
    config = KernelsConfig(**named)
    return list(
        slow_attention(config, select.select(config, unavailable, shape), unavailable, shape)
    )


def test_a_gpu_without_flashinfer_is_slow_aloud() -> None:
    (warning,) = warnings()
    assert warning.startswith(
        "SLOW ATTENTION: kernels.attention is sdpa, because flashinfer cannot run"
    )
    assert NO_NVCC in warning and "2 to 13 times as long" in warning


def test_a_cache_in_fp8_names_the_backend_for_it() -> None:
    shape = replace(GPU, attention_specs=(replace(HEADS, fp8_cache=True),))
    (warning,) = warnings(shape)
    assert "is triton, because flashinfer_fp8 cannot run here: no nvcc" in warning
    assert "13 times" not in warning, "measured for sdpa alone"


def test_no_warning_where_an_installation_would_change_nothing() -> None:
    assert warnings(unavailable={}) == []
    assert warnings(replace(GPU, device="cpu")) == []
    assert warnings(attention="sdpa") == [], "named in the configuration"
    assert warnings(replace(GPU, dtype=torch.float32)) == [], "flashinfer has no float32"
    old = WITHOUT | {"attention.flashinfer_fp8": "it needs a Hopper GPU"}
    assert warnings(replace(GPU, attention_specs=(replace(HEADS, fp8_cache=True),)), old) == []


def test_check_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start prints the same, because it runs the check."""
    config = load_config(CONFIGS / "gpu-bench.yaml")
    monkeypatch.setattr(checking, "probe_or_assume", lambda device: (WITHOUT, "a GPU"))
    first, *_ = checking.check(config).warnings
    assert first.startswith("SLOW ATTENTION: kernels.attention is sdpa") and NO_NVCC in first
    monkeypatch.setattr(checking, "probe_or_assume", lambda device: ({}, "a GPU"))
    assert not any("SLOW" in warning for warning in checking.check(config).warnings)


def test_programs_beside_this_python_are_found() -> None:
    """pip installs flashinfer's ninja there; a virtual environment need not be activated."""
    environment = {"PATH": "/usr/bin"}
    add_own_programs(environment)
    assert environment["PATH"] == f"/usr/bin{os.pathsep}{os.path.dirname(sys.executable)}"
    add_own_programs(environment)
    assert environment["PATH"].count(os.pathsep) == 1
