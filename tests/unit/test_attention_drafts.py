"""Rows of drafts in attention on a CPU, against dense attention."""

import pytest

from kernels.attention.base import Attention
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import SdpaAttention
from tests.unit.test_kernels_attention import WINDOW_LAYERS, check, needs_native


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    "backend", [SdpaAttention, pytest.param(NativeAttention, marks=needs_native)]
)
def test_drafts_equal_dense_attention(backend: type[Attention], windows: bool, padding: int):
    """Beside decodes and prompts, and alone."""
    specs = WINDOW_LAYERS if windows else None
    mixed = [(11, 1), (2, 1), (9, 4), (30, 2), (3, 3), (0, 9), (8, 4)]
    for seqs, num_verify in ((mixed, 3), ([(7, 4), (40, 4)], 2)):
        check(seqs, specs=specs, num_verify=num_verify, padding=padding, backend=backend)
