"""Prompts over an FP8 cache by flashinfer: its kernel in torch's operators, ours in Triton's interpreter."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.attention import flashinfer_fp8
from kernels.attention.flashinfer_fp8 import FlashInferFp8Attention
from kernels.attention.spans import attend_span
from kernels.interface.attention_spec import AttentionSpec
from tests.triton.device import COMPILED
from tests.unit.test_kernels_attention import BATCHES, Pages, Seqs, check, check_layer
from tests.unit.test_kernels_select import CUDA

SPEC = AttentionSpec(8, 2, 16, 0.3, fp8_cache=True)
pytestmark = pytest.mark.skipif(COMPILED, reason="tests/gpu runs flashinfer itself")


class Ragged:
    """flashinfer's wrapper of prompts over rows of K and V."""

    keys: list[int]

    def __init__(self, workspace: torch.Tensor, backend: str):
        assert backend == "fa3"

    def plan(
        self, starts: torch.Tensor, key_starts: torch.Tensor, *heads: int, **options: Any
    ) -> None:
        assert starts.dtype == key_starts.dtype == torch.int32 and options["causal"]
        self.starts, self.key_starts = starts.tolist(), key_starts.tolist()
        self.spec = AttentionSpec(*heads, options["sm_scale"])

    def run(
        self, q_THd: torch.Tensor, k_Lhd: torch.Tensor, v_Lhd: torch.Tensor, *, out: torch.Tensor
    ) -> None:
        assert (len(q_THd), len(k_Lhd)) == (self.starts[-1], self.key_starts[-1])
        Ragged.keys.append(len(k_Lhd))
        for seq in range(len(self.starts) - 1):
            rows = slice(self.starts[seq], self.starts[seq + 1])
            keys = slice(self.key_starts[seq], self.key_starts[seq + 1])
            out[rows] = attend_span(q_THd[rows], k_Lhd[keys], v_Lhd[keys], self.spec, None)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flashinfer's calls, and CUDA's that the host makes, on a machine without both."""
    fake = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Ragged)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(FlashInferFp8Attention, "compile_kernels", lambda *_: None)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(flashinfer_fp8, "EXPANDED_BYTES", 2**16)
    Ragged.keys = []


def run(seqs: Seqs, attention: FlashInferFp8Attention | None = None, **options: Any) -> Any:
    return check(
        seqs,
        specs=[SPEC],
        dtype=torch.bfloat16,
        rounded=True,
        attention=attention,
        backend=FlashInferFp8Attention,
        **options,
    )


@pytest.mark.parametrize(
    ("label", "keys"),
    [("decodes", []), ("first_chunks", [19]), ("mixed", [31]), ("continued_chunks", [27])],
)
def test_equals_dense_attention(label: str, keys: list[int]) -> None:
    """New prompts read the new rows, others expanded rows of the whole sequence; decodes are not expanded."""
    run(BATCHES[label], padding=2)
    assert Ragged.keys == keys


def test_sequences_that_do_not_fit_run_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_fp8, "EXPANDED_BYTES", 25 * 2 * 2 * 2 * 16)
    run([(5, 1), (9, 3), (7, 6), (3, 2), (1, 4)], padding=1)
    assert Ragged.keys == [25]
    run([(30, 2), (1, 1)], padding=1)
    assert Ragged.keys == [25]


def test_a_plan_leaves_nothing_to_the_next() -> None:
    attention = run(BATCHES["mixed"])
    for label in ("idle", "decodes", "first_chunks"):
        run(BATCHES[label], attention)


@torch.inference_mode()
def test_fused_store_rounds_the_rows_that_prompts_read() -> None:
    pages = Pages(BATCHES["mixed"], [SPEC], 4, torch.bfloat16, 2, rounded=True)
    attention, (layer,) = FlashInferFp8Attention([SPEC], 4), pages.layers
    attention.bind(pages.caches)
    attention.plan(pages.batch())
    qkv_TMd = torch.cat((layer.q, layer.k, layer.v), 1)
    attention.store(qkv_TMd, 0)
    check_layer(pages, layer, attention.attend(qkv_TMd, 0))


def test_what_it_refuses() -> None:
    def reason(*specs: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> str | None:
        shape = replace(CUDA, attention_specs=specs, dtype=dtype)
        return FlashInferFp8Attention.unsupported_reason(shape)

    spec = AttentionSpec(8, 2, 128, 0.3, fp8_cache=True)
    assert reason(spec, spec) is None
    assert "cache.dtype is not fp8" in str(reason(replace(spec, fp8_cache=False)))
    assert "model.dtype is float16" in str(reason(spec, dtype=torch.float16))
    assert "equal attention" in str(reason(spec, replace(spec, scale=0.1)))
    assert "head_dim of 64, 128, 256" in str(reason(replace(spec, head_dim=32)))
    assert "a power of two, the model has 96" in str(reason(replace(spec, head_dim=96)))
    assert "sliding window" in str(reason(replace(spec, window=4)))
    assert "no attention sinks" in str(reason(replace(spec, sinks=True)))
