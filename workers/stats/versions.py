"""Versions of the software of a rank. All ranks of a group must have equal ones. Imports nothing heavy."""

import hashlib
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OURS = tuple(Path(__file__).parents[2] / folder for folder in ("kernels", "workers"))
SOURCES = (".py", ".c")
# torch with the libraries that its collectives run on, and the distributions of all backends.
LIBRARIES = (
    *(
        "torch",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
        "nvidia-nvshmem-cu12",
        "nvidia-nvshmem-cu13",
    ),
    *("triton", "flashinfer-python", "deep_ep", "sgl-deep-ep", "sgl-deep-gemm", "deep-gemm"),
)


def phalanx_version() -> str:
    """Return the version of the installed Phalanx, which pyproject.toml sets."""
    return version_of("phalanx")


@cache
def rank_versions() -> dict[str, str]:
    """Return the versions of Phalanx, Python and the libraries here, as they are at the first call.

    The version of Phalanx includes a digest of its sources, because two checkouts may have one version number.
    """
    found = {name: version_of(name) for name in ("phalanx", *LIBRARIES)}
    found["phalanx"] += f", sources {source_digest()}"
    return found | {"python": platform.python_version()}


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def source_digest(folders: Iterable[Path] = OURS) -> str:
    """Return a text that differs where the sources in `folders` differ, in names or contents."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in SOURCES:
                name = path.relative_to(folder.parent)
                digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]
