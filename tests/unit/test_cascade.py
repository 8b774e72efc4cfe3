"""Decodes whose leading blocks are read once, by the CPU's backends, against dense attention in float32."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import shared_rows
from kernels.attention.latent_up import LatentHeads
from kernels.attention.mla import MlaAttention
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec
from tests.shared_case import Groups, reads, share, share_latents, use_cascade, with_groups
from tests.unit.test_kernels_attention import Pages, Seqs, check_layer, needs_native
from tests.unit.test_mla import SPECS, LatentRows

SPEC, SINKS = AttentionSpec(6, 2, 8, 0.3), AttentionSpec(6, 2, 8, 0.3, sinks=True)
LAYERS = (SPEC, replace(SPEC, window=9), SINKS)
SEQS: Seqs = [(13, 1), (40, 1), (12, 1), (3, 1), (100, 1), (70, 1), (0, 9), (6, 5)]
GROUPS: Groups = [((0, 2), 3), ((1, 4, 5), 9)]
BLOCK = 4


def paged(specs: tuple[AttentionSpec, ...], dtype: torch.dtype, padding: int) -> Pages:
    pages = Pages(SEQS, specs, BLOCK, dtype, padding, stale=True)
    share(pages, GROUPS)
    return pages


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_sdpa(fp8: bool, dtype: torch.dtype, small_chunks: bool, monkeypatch):
    if small_chunks:
        monkeypatch.setattr(shared_rows, "KEY_CHUNK", 8)
    specs = tuple(replace(spec, fp8_cache=fp8) for spec in LAYERS)
    pages = paged(specs, dtype, 2)
    attention = SdpaAttention(specs, BLOCK)
    use_cascade(attention)
    attention.bind(pages.caches)
    attention.plan(with_groups(pages.batch(), GROUPS))
    assert reads(attention) == (5, (3 + 2 * 9) * BLOCK)
    for number, layer in enumerate(pages.layers):
        check_layer(pages, layer, attention(layer.q, layer.k, layer.v, number, layer.sinks))


@needs_native
def test_native():
    """Layers with sinks share too; steps without groups in between."""
    pages = paged(LAYERS, torch.float32, 2)
    attention = NativeAttention(LAYERS, BLOCK)
    use_cascade(attention)
    attention.bind(pages.caches)
    for groups, rows in ((GROUPS, 5), ([], 0), (GROUPS[1:], 3)):
        before, _ = reads(attention)
        attention.plan(with_groups(pages.batch(), groups))
        assert reads(attention)[0] - before == rows
        for number, layer in enumerate(pages.layers):
            check_layer(pages, layer, attention(layer.q, layer.k, layer.v, number, layer.sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents(dtype: torch.dtype):
    pages = Pages(SEQS, [], BLOCK, dtype, 2, stale=True)
    layers = [LatentRows(pages, spec, dtype, 2) for spec in SPECS]
    share_latents(pages, layers, GROUPS)
    attention = MlaAttention(SPECS, BLOCK)
    use_cascade(attention)
    attention.bind([layer.cache for layer in layers])
    attention.plan(with_groups(pages.batch(), GROUPS))
    assert reads(attention) == (5, (3 + 2 * 9) * BLOCK)
    tolerance = 2e-5 if dtype == torch.float32 else 8e-2
    for number, layer in enumerate(layers):
        out = attention.attend_latent(layer.q, layer.new, LatentHeads(layer.kv_up), number)
        for seq in range(6):
            expected = layer.dense(seq, layer.q[seq : seq + 1])
            found = out[seq : seq + 1].float()
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_who_can_share():
    windows = (replace(SPEC, window=9),)
    assert SdpaAttention.cascade_refusal(LAYERS) is None
    assert "no layer reads all tokens" in str(NativeAttention.cascade_refusal(windows))
    assert "sinks" in str(SdpaAttention.cascade_refusal([SINKS, *windows]))
    assert NativeAttention.cascade_refusal([SINKS, *windows]) is None
    assert TritonPagedAttention.cascade_refusal([SINKS, *windows]) is None
