"""Paged attention with sinks and windows against dense attention in float32."""

import pytest
import torch

from kernels.attention.spec import AttentionSpec
from kernels.attention.triton_paged import TritonPagedAttention
from tests.triton.device import DEVICE, compiled_only
from tests.unit.test_kernels_attention import BATCHES, check

LAYERS = (
    AttentionSpec(8, 1, 16, 0.3, window=9, sinks=True),
    AttentionSpec(8, 1, 16, 0.3, sinks=True),
    AttentionSpec(16, 2, 24, 0.2, window=70, sinks=True),
    AttentionSpec(8, 1, 16, 0.3),
)
# Batches of few tiles: the interpreter takes a second for some hundred.
SHORT = ["one_decode", "decodes", "first_chunks", "continued_chunks", "mixed", "idle"]
LONG = sorted(BATCHES.keys() - {*SHORT})


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("label", [*SHORT, "very_different_lengths", *compiled_only(*LONG)])
@torch.inference_mode()
def test_equals_dense_attention(label: str, dtype: torch.dtype):
    check(
        BATCHES[label],
        specs=LAYERS,
        padding=2,
        dtype=dtype,
        backend=TritonPagedAttention,
        device=DEVICE,
    )
