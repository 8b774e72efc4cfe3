"""Gated delta nets with prompts by flashinfer on a GPU, against the recurrence over single tokens in float64."""

import pytest
import torch

from kernels.backends.select import probe
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.flashinfer_delta import FlashInferLinearAttention
from tests.linear_case import BATCHES, check

MISSING = (
    probe("cuda").get("linear_attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@torch.inference_mode()
def test_batches(batch: str, states: str) -> None:
    spec = LinearAttentionSpec(2, 4, 128, 128, 4, states)
    check(
        FlashInferLinearAttention,
        [spec],
        BATCHES[batch],
        1e-4,
        dtype=torch.bfloat16,
        device="cuda",
    )
