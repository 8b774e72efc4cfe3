"""A delta net in FP8 with its kernels in one forward: norms that write rows in FP8, few rows and many."""

from dataclasses import replace
from functools import partialmethod

import pytest
import torch

from kernels import dense_fp8
from kernels.all2all.base import sum_partials
from kernels.block_fp8 import BlockWeights, Fp8Rows, dequantise
from kernels.fused import fused_kernels
from kernels.triton.quantise_rows import quantise_rows
from tests.closeness import calc_diff
from tests.gdn_case import HIDDEN, Reference, exact, gdn, moved
from tests.triton.device import COMPILED, DEVICE
from tests.unit.model_case import make_batch
from workers.layers import linear, norm

PROMPTS = make_batch([[1] * 3, [2] * 40], [0, 0], padding=2)
DECODES = make_batch([[1], [2]], [3, 40], padding=1)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Run the kernels on this device, and DeepGEMM's product in torch; yields shapes that a kernel only quantises."""
    found = fused_kernels("cuda")
    assert found is not None
    kernels = replace(found, takes_skinny=lambda x, weights: False)
    for module in (norm, linear):
        monkeypatch.setattr(module, "fused_kernels", lambda device: kernels)
    if not COMPILED:
        fused = partialmethod(norm.RMSNorm.__init__, fused=True)
        monkeypatch.setattr(norm.RMSNorm, "__init__", fused)
    shapes: list[torch.Size] = []
    quantise = dense_fp8.quantise

    def multiply(x: Fp8Rows, weights: BlockWeights, *, partial: bool = False) -> torch.Tensor:
        out_TN = exact(x) @ dequantise(weights.values, weights.scales).t()
        return torch.stack((out_TN / 2, out_TN / 2)) if partial else out_TN

    def counted(x: torch.Tensor) -> Fp8Rows:
        shapes.append(x.shape)
        return quantise(x)

    monkeypatch.setattr(dense_fp8, "multiply", multiply)
    monkeypatch.setattr(dense_fp8, "quantise", counted)
    return shapes


def rounded(x: torch.Tensor) -> Fp8Rows:
    """Rows on the CPU; the interpreter rounds otherwise than torch does."""
    rows = quantise_rows(x.to(DEVICE))
    return Fp8Rows(rows.values.cpu(), rows.scales.cpu())


@torch.inference_mode()
def test_rows_are_rounded_by_the_norms(quantised: list[torch.Size]) -> None:
    """Prompts, then decodes that go on from their states, in float32: only the order of sums differs."""
    name = "triton" if COMPILED else "torch"
    block = gdn(name, DEVICE, torch.float32)
    reference = Reference(block, rounded)
    for batch in (PROMPTS, DECODES):
        generator = torch.Generator().manual_seed(batch.num_tokens)
        x_TD, delta_TD = torch.randn(2, len(batch.input_ids), HIDDEN, generator=generator)
        sum_TD = x_TD + delta_TD
        block.linear_attention.plan(moved(batch, DEVICE))
        residual_TD, out = block.forward(x_TD.to(DEVICE), delta_TD.to(DEVICE), x_TD)
        assert torch.equal(residual_TD.cpu(), sum_TD)
        assert out is not None and out.dim() == 3, "sums may stay apart"
        expected_TD = reference.forward(sum_TD, batch)
        real = slice(0, batch.num_tokens)
        assert calc_diff(sum_partials(out).cpu()[real], expected_TD[real]) < 1e-5
    assert not quantised
