"""Where results come from: hardware, versions and commit. Of experiments and of the measurements in scripts/bench."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.bench import machine

PACKAGES = ("triton", "deep_ep", "sgl-deep-ep", "sgl-deep-gemm", "flashinfer-python")
GIT_TIMEOUT_S = 10


def origin() -> dict[str, Any]:
    """Return the date, the hardware, the versions, and the commit of the code if it is a checkout."""
    versions = {**machine.versions(), **compute_versions()}
    return {
        "date": now(),
        "hardware": machine.hardware(),
        "versions": versions,
        "commit": commit(),
    }


def compute_versions() -> dict[str, str]:
    """Return the versions of torch, CUDA, NCCL and the packages of kernels. Imports torch."""
    import torch

    found = {"torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, nccl))
    return found | machine.installed(PACKAGES)


def now() -> str:
    """Return the time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return the hash of the commit of this code, with a + where tracked files were changed; None without git."""
    own = Path(__file__).resolve()
    try:
        _git(own.parent, "ls-files", "--error-unmatch", own.name)  # not a checkout around a .venv
        return _git(own.parent, "describe", "--always", "--dirty=+", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
    )
    return done.stdout.strip()
