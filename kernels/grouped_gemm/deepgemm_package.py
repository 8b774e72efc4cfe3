"""The package deep_gemm: whether it loads, and which version is installed."""

import functools
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from kernels.host.cache_folder import cache_folder

DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm")
FITS = "sgl-deep-gemm 0.1.4.post1 is for torch 2.11, each release for one torch"
NEEDED = (
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "fp8_m_grouped_gemm_nt_masked",
    "get_mk_alignment_for_contiguous_layout",
    "fp8_gemm_nt",
)


class DeepGemmUnavailableError(RuntimeError):
    """DeepGEMM cannot be used here. The message has the reason."""


def load_deep_gemm() -> Any:
    """Return the module `deep_gemm`. Raises DeepGemmUnavailableError where it is missing or too old."""
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(cache_folder() / "deep_gemm"))
    try:
        import deep_gemm
    # A wheel for another torch fails in many ways, with AssertionError without CUDA.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DeepGemmUnavailableError(
            f"import deep_gemm failed with torch {torch.__version__} ({installed()}; {FITS}): {lines[0]}"
        ) from error
    lacking = [name for name in NEEDED if not hasattr(deep_gemm, name)]
    if lacking:
        raise DeepGemmUnavailableError(f"{installed()}, {FITS}: it has no {', '.join(lacking)}")
    return deep_gemm


@functools.cache
def package_unavailable() -> str | None:
    """Return why DeepGEMM cannot be used here, or None."""
    if find_spec("deep_gemm") is None:
        return f"deep_gemm is not installed: {FITS}"
    try:
        load_deep_gemm()
    except DeepGemmUnavailableError as error:
        return str(error)
    return None


def installed() -> str:
    """Return name and version of the installed distribution, as a sentence."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {version(name)} is installed"
        except PackageNotFoundError:
            continue
    return "an unknown version is installed"
