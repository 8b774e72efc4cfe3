"""Decodes over latents (MLA) in e4m3 by the kernel of 64 heads: on a Hopper GPU compiled, else as Python."""

from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.attention.decode_chunks import cut_rows, whole_rows
from kernels.attention.fp8_latents import Fp8Latents
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import layout_of
from kernels.triton.decode_merge import Chunks
from kernels.triton.fp8_heads import E4M3_TO_BFLOATS
from kernels.triton.latent_decode import FORM, WIDE, form_of, head_parts, latent_decode
from tests.closeness import calc_diff
from tests.triton.device import COMPILED, DEVICE, FOR_HOPPER
from tests.triton.gluon_tensors import in_python

pytestmark = pytest.mark.skipif(not FOR_HOPPER, reason="needs a Hopper GPU")
NAME = "kernels.triton.hopper_latent_decode"
DIMS, SCALE = MlaDims(512, 64, 128, 128), 0.07
LENS = (5, 130, 64, 300)


def of_bytes(words: torch.Tensor) -> list[torch.Tensor]:
    """The four e4m3 values of each word as bfloat16, in order of memory."""
    plain = words.as_subclass(torch.Tensor).contiguous()
    halves = plain.view(torch.float8_e4m3fn).bfloat16()
    return list(halves.view(*words.shape, 4).unbind(-1))


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    found = pytest.importorskip(NAME)
    if COMPILED:
        return found
    return in_python(NAME, {E4M3_TO_BFLOATS.value: of_bytes}, ["kernels.triton.hopper_ring"])


class Case:
    """Decodes of sequences of LENS keys over a cache of random latents, scales of 2^-3 to 1, and a row without keys."""

    def __init__(self, num_heads: int, block_size: int, *, cut: bool, chunks: int = 9):
        torch.manual_seed(0)
        spec = AttentionSpec(num_heads, 1, 192, SCALE, mla=DIMS, fp8_cache=True)
        blocks = [-(-keys // block_size) for keys in LENS]
        cache = torch.zeros(layout_of(spec).shape(sum(blocks), block_size), dtype=torch.uint8)
        parts = Fp8Latents(cache, DIMS, block_size)
        parts.keys.normal_()
        values = torch.randn(parts.values.shape)
        parts.values.copy_(values)
        parts.exponents.random_(124, 128)
        order = torch.randperm(sum(blocks)).split(blocks)
        table = torch.zeros(len(LENS) + 1, max(blocks), dtype=torch.int64)
        for row, own in enumerate(order):
            table[row, : len(own)] = own
        self.rows = len(LENS) + 1
        of_heads = torch.randn(num_heads, self.rows, 512) / 8
        self.q = of_heads.bfloat16().to(DEVICE).transpose(0, 1)
        self.rope = torch.randn(self.rows, num_heads, 192).bfloat16().to(DEVICE)[..., 128:]
        lens = np.array(LENS, np.int32)
        whole = whole_rows(lens, None, self.rows)
        arrays = (cut_rows(lens, None, self.rows, chunks) if cut else whole).arrays
        integers = (torch.from_numpy(it).to(DEVICE) for it in arrays)
        self.chunks = Chunks(*integers, table.to(DEVICE), cut)
        self.caches = [it.to(DEVICE) for it in parts.tensors]
        self._wide = self._latents(parts, table)

    @staticmethod
    def _latents(parts: Fp8Latents, table: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Latents and rotated keys of each sequence in float32."""
        scale = torch.exp2(parts.exponents.float() - 127)[..., None]
        latents, found = parts.values.float() * scale, []
        for row, keys in enumerate(LENS):
            own = latents[table[row]].flatten(0, 1)[:keys]
            found.append((own, parts.keys[table[row]].flatten(0, 1)[:keys].float()))
        return found

    def expected(self, row: int) -> torch.Tensor:
        latents, keys = self._wide[row]
        q, rope = self.q[row].float().cpu(), self.rope[row].float().cpu()
        return ((q @ latents.T + rope @ keys.T) * SCALE).softmax(-1) @ latents

    def run(self, decode: object, **options: object) -> torch.Tensor:
        out = torch.full(self.q.shape, 7.0, dtype=torch.bfloat16, device=DEVICE)
        decode(self.q, self.rope, self.caches, out, self.chunks, scale=SCALE, **options)  # type: ignore[operator]
        return out


@pytest.mark.parametrize(
    ("num_heads", "block_size", "cut"),
    [(128, 16, False), (64, 64, False), (80, 1, False), (65, 48, True)],
)
@torch.inference_mode()
def test_equals_dense_attention(
    kernel: ModuleType, num_heads: int, block_size: int, cut: bool
) -> None:
    """Chunks begin and end within a tile; a row has no keys, and the last program fewer heads."""
    case = Case(num_heads, block_size, cut=cut)
    out = case.run(kernel.hopper_latent_decode)
    for row in range(len(LENS)):
        expected, found = case.expected(row), out[row].float().cpu()
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        assert calc_diff(found, expected) < 1e-5
    assert not out[-1].any()


@torch.inference_mode()
def test_equals_the_form_of_32_heads(kernel: ModuleType) -> None:
    """But for weights and outputs in bfloat16: Triton's interpreter cuts off what the other rounds."""
    case = Case(64, 16, cut=False)
    found = case.run(kernel.hopper_latent_decode).float()
    other = case.run(latent_decode, form=FORM).float()
    torch.testing.assert_close(found, other, atol=8e-3, rtol=8e-3)
    assert calc_diff(found, other) < 2e-5


def test_models_of_many_heads_take_it(kernel: ModuleType) -> None:
    assert [form_of(heads) for heads in (16, 17, 20, 64, 128)] == [FORM, *[WIDE] * 4]
    assert [head_parts(heads) for heads in (16, 17, 20, 64, 65, 128)] == [1, 1, 1, 1, 2, 2]
    case = Case(64, 16, cut=False)
    assert kernel.takes(case.q, case.rope)
    assert not kernel.takes(case.q.half(), case.rope.half())
    assert not kernel.takes(case.q[..., :256], case.rope) and not kernel.takes(
        case.q, case.rope.repeat(1, 1, 2)[..., 1:65]
    )
