"""Decodes over pages in e4m3 by single warps against dense attention: on a Hopper GPU compiled, else as Python."""

from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.attention.decode_chunks import cut_rows, whole_rows
from kernels.interface.attention_spec import AttentionSpec
from kernels.triton.decode_merge import Chunks
from tests.closeness import calc_diff
from tests.triton.device import COMPILED, DEVICE, FOR_HOPPER
from tests.triton.gluon_tensors import in_python
from tests.unit.test_kernels_attention import Pages

pytestmark = pytest.mark.skipif(not FOR_HOPPER, reason="needs a Hopper GPU")
NAME = "kernels.triton.warp_decode_fp8"


def of_bytes(words: torch.Tensor) -> list[torch.Tensor]:
    """The four e4m3 values of each word as float16, in order of memory."""
    plain = words.as_subclass(torch.Tensor).contiguous()
    halves = plain.view(torch.float8_e4m3fn).half()
    return list(halves.view(*words.shape, 4).unbind(-1))


def in_turns(even: torch.Tensor, odd: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x for pair in zip(of_bytes(even), of_bytes(odd), strict=True) for x in pair)


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    if COMPILED:
        return pytest.importorskip(NAME)
    source = pytest.importorskip(NAME)
    return in_python(NAME, {source.WIDEN.value: of_bytes, source.WIDEN_PAIRS.value: in_turns})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "cut"),
    [(8, 1, 16, False), (6, 2, 48, True), (16, 1, 32, False), (4, 4, 16, True)],
)
@torch.inference_mode()
def test_equals_dense_attention(
    kernel: ModuleType, heads: int, kv_heads: int, block_size: int, cut: bool
) -> None:
    """Chunks end within a tile; one row has no keys, and what a request left behind its end does not matter."""
    seqs = [(5, 1), (290, 1), (31, 1), (63, 1)]
    spec = AttentionSpec(heads, kv_heads, 128, 0.1, fp8_cache=True)
    pages = Pages(seqs, [spec], block_size, torch.bfloat16, 0, stale=True)
    (layer,) = pages.layers
    layer._write(pages.slots, layer.k, layer.v)
    pages.move(DEVICE)
    lens = np.array([sum(seq) for seq in seqs], np.int32)
    rows = len(seqs) + 1
    arrays = (cut_rows(lens, None, rows, 9) if cut else whole_rows(lens, None, rows)).arrays
    chunks = Chunks(
        *(torch.from_numpy(it).to(DEVICE) for it in arrays), pages.batch().block_table, cut
    )
    q = torch.cat((layer.q, layer.q[:1]))
    out = torch.full_like(q, 7.0)
    kernel.warp_decode_fp8(q, layer._pages().tensors, out, chunks, scale=spec.scale)
    for seq in range(len(seqs)):
        expected = layer.dense(seq, layer.q[seq : seq + 1].cpu())
        found = out[seq : seq + 1].float().cpu()
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
        assert calc_diff(found, expected) < 1e-5
    assert not out[-1].any()


def test_takes_whole_heads_and_pages(kernel: ModuleType) -> None:
    taken = [kernel.takes(*case) for case in ((32, 4, 128, 16), (64, 4, 128, 48), (1, 1, 128, 256))]
    left = [kernel.takes(*case) for case in ((32, 4, 64, 16), (64, 2, 128, 16), (32, 4, 128, 8))]
    assert taken == [True] * 3 and left == [False] * 3
