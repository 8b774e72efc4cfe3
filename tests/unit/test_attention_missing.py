"""flashinfer that is installed and does not load is as good as missing, and says why."""

import sys
from pathlib import Path

import pytest
import torch

from kernels.attention import flashinfer, flashinfer_modules


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Make one of this source, on a machine that has all else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(flashinfer, "version", lambda name: "0.6.6")
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: name)
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
