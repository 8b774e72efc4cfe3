"""What each grouped GEMM needs, in which order `auto` tries them, and how they are built.

Used by `kernels.backends.select` alone. Imports a vendor's package only to see whether it works, or to build.
"""

import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch.nn import functional as F

from kernels.backends.missing import Missing
from kernels.block_fp8 import BLOCK
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.deepgemm import (
    FITS,
    DeepGemm,
    DeepGemmFp8,
    DeepGemmUnavailableError,
    load_deep_gemm,
)
from kernels.grouped_gemm.native import NativeGroupedGemm
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.grouped_gemm.torch_grouped import ROW_ALIGNMENT, TorchGroupedGemm
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm

GEMMS: dict[str, type[GroupedGemm]] = {
    gemm.name: gemm
    for gemm in (
        ReferenceGroupedGemm,
        TorchGroupedGemm,
        NativeGroupedGemm,
        TritonGroupedGemm,
        DeepGemm,
        DeepGemmFp8,
    )
}
TRITON_VERSION = (3, 4)  # tensor descriptors made on the host
DEEP_GEMM = ("deepgemm", "deepgemm_fp8")
ON_DEVICE = ("triton", *DEEP_GEMM)


def missing(device: torch.device) -> Missing:
    """Backend name to why it cannot run on this machine at all; `native` is looked for elsewhere."""
    found: dict[str, str] = {}
    if not hasattr(F, "grouped_mm"):
        found["torch_grouped"] = f"torch {torch.__version__} has no grouped_mm (2.10 or newer has)"
    if device.type == "cpu":
        return Missing(found)
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        reason = "it needs compute capability 8.0, found {}.{}".format(*capability)
        found |= dict.fromkeys(("torch_grouped", "triton"), reason)
    if reason := triton_missing():
        found["triton"] = reason
    look = functools.partial(_deep_gemm_missing, capability)
    return Missing(found, dict.fromkeys(DEEP_GEMM, look))


def triton_missing() -> str | None:
    """Why our Triton kernels cannot run, or None."""
    needed = ".".join(map(str, TRITON_VERSION))
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return f"triton is not installed, {needed} or newer is needed"
    if tuple(int(part) for part in installed.split(".")[:2]) < TRITON_VERSION:
        return f"triton {installed} is installed, {needed} or newer is needed"
    return None


@functools.cache
def _deep_gemm_missing(capability: tuple[int, int]) -> str | None:
    if capability < (9, 0):
        return "it needs compute capability 9.0, found {}.{}".format(*capability)
    if find_spec("deep_gemm") is None:
        return f"deep_gemm is not installed: {FITS}"
    try:
        load_deep_gemm()
    except DeepGemmUnavailableError as error:
        return str(error)
    return None


def order(device: str, *, fp8_checkpoint: bool = False) -> dict[str, str]:
    """What `auto` tries, best first, with the reason.

    FP8 only for a checkpoint whose experts are stored in it: it would change the answers of others.
    """
    if device == "cuda":
        fp8 = {
            "deepgemm_fp8": "the checkpoint's experts are in FP8, and are computed with as they are"
        }
        return {
            **(fp8 if fp8_checkpoint else {}),
            # docs/results/gpu-experts.md
            "triton": "the fastest in bfloat16 on an H200 at any size of step: 92 us a layer for 998 rows, "
            "335 us for 16,347 (deepgemm 127 and 377, torch_grouped 137 and 424)",
            "deepgemm": "faster than torch_grouped on an H200: 127 us a layer for 998 rows against 137, "
            "377 us for 16,347 against 424",
            "torch_grouped": "one call for all experts",
            "reference": "a loop over experts runs everywhere",
        }
    return {
        "native": "one call of compiled C for the few rows of a decode",
        "torch_grouped": "one call for all experts",
        "reference": "a loop over experts runs everywhere",
    }


def shape_unsupported_reason(
    name: str, device: str, dtype: torch.dtype, hidden_size: int, expert_width: int
) -> str | None:
    """Why a backend that is there cannot compute this model's experts, or None."""
    if name == "reference":
        return None
    if name in ON_DEVICE and device != "cuda":
        return "it runs on GPUs only"
    called = {"torch_grouped": "grouped_mm", "native": "grouped_mm"}.get(name, name)
    wants_bfloat16 = name in DEEP_GEMM or (name == "torch_grouped" and device == "cuda")
    if wants_bfloat16 and dtype != torch.bfloat16:
        where = "" if name in DEEP_GEMM else " on GPUs"
        return f"{called}{where} takes bfloat16 only, model.dtype is {str(dtype)[6:]}"
    multiple = {"deepgemm": BLOCK // 2, "deepgemm_fp8": BLOCK}.get(name)
    for what, width in (("hidden size", hidden_size), ("expert width", expert_width)):
        if multiple is not None and width % multiple:
            return f"{name} needs widths of a multiple of {multiple}, {what} is {width}"
        if width * dtype.itemsize % ROW_ALIGNMENT:
            return (
                f"{called} needs rows of a multiple of {ROW_ALIGNMENT} bytes, "
                f"{what} {width} in {str(dtype)[6:]} has {width * dtype.itemsize}"
            )
    return None


def build(name: str) -> GroupedGemm:
    """Construct a backend on the current device."""
    return GEMMS[name]()
