"""Gated delta nets around flashinfer's kernel for prompts: the kernel in torch's operators, ours in Triton."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.flashinfer_delta import FlashInferLinearAttention
from tests.linear_case import BATCHES, LinearCase, check
from tests.triton.device import COMPILED
from tests.unit.test_kernels_select import CUDA

pytestmark = pytest.mark.skipif(COMPILED, reason="tests/gpu runs flashinfer itself")


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    output: torch.Tensor,
    output_state: torch.Tensor,
) -> None:
    """`flashinfer.gdn_prefill.chunk_gated_delta_rule`; states are [N, V, v, k]."""
    tensors = (q, k, v, alpha, beta, initial_state, cu_seqlens, output, output_state)
    assert output_final_state and all(it.is_contiguous() for it in tensors)
    assert alpha.dtype == beta.dtype == initial_state.dtype == output_state.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int64 and int(cu_seqlens[-1]) == len(q) == len(output)
    bounds = cu_seqlens.tolist()
    assert all(a < b for a, b in pairwise(bounds)), "an empty sequence"
    group = v.shape[1] // k.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (q, k))
    for seq, (start, end) in enumerate(pairwise(bounds)):
        state = initial_state[seq].clone()
        for row in range(start, end):
            state *= alpha[row, :, None, None]
            delta = beta[row, :, None] * (
                v[row].float() - torch.einsum("hvk,hk->hv", state, k[row])
            )
            state += torch.einsum("hv,hk->hvk", delta, k[row])
            output[row] = scale * torch.einsum("hvk,hk->hv", state, q[row])
        output_state[seq] = state


@pytest.fixture(autouse=True)
def fake_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(chunk_gated_delta_rule=delta_rule)
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", module)


@pytest.mark.parametrize("batch", ["nothing", "decodes", "short_prompts", "mixed"])
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@torch.inference_mode()
def test_batches(batch: str, states: str) -> None:
    spec = LinearAttentionSpec(1, 2, 16, 32, 4, states)
    seqs = BATCHES[batch] if batch != "mixed" else [(3, 1), (0, 1), (70, 5), (0, 30), (1, 2)]
    check(FlashInferLinearAttention, [spec], seqs, 2e-6, dtype=torch.float16)


@torch.inference_mode()
def test_a_ubatch_continues_a_prompt() -> None:
    case = LinearCase([LinearAttentionSpec(1, 2, 16, 16, 4)], [(3, 1), (0, 20)], padding=2)
    batch, (mixed, a, b) = case.batch(), case.rows(0)
    weights, outs = case.layers[0].weights("cpu"), []
    for start, end in ((0, 8), (8, 23)):
        subject = FlashInferLinearAttention(case.specs)
        subject.bind(case.states)
        subject.plan(batch.ubatch(start, end))
        rows = slice(start, end)
        outs.append(subject(mixed[rows], a[rows], b[rows], 0, *weights))
    case.check(0, torch.cat(outs))


def test_what_it_takes() -> None:
    spec = LinearAttentionSpec(16, 32, 128, 128, 4)
    shape = replace(CUDA, linear_specs=(spec,))
    reason = FlashInferLinearAttention.unsupported_reason
    assert reason(shape) is None and FlashInferLinearAttention.auto_reason(shape) is None
    assert "model.dtype is float32" in str(reason(replace(shape, dtype=torch.float32)))
    narrow = replace(shape, linear_specs=(replace(spec, key_dim=64),))
    assert "128 values, the model has 64 and 128" in str(reason(narrow))
    assert not FlashInferLinearAttention.mixed_graph
