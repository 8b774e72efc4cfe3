"""Our Triton kernels have one compiled form each, whatever the sizes of a step and wherever its slices begin.

Triton compiles anew for an integer that is 1 or a multiple of 16 and for a pointer that is a multiple of 16 bytes,
unless told not to; a warm-up cannot meet all combinations of those.

N rows, D their width, K experts per row, E experts, B sequences.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# One, a multiple of 16, and neither; 16 and 17 rows of 8 experts are both one chunk of pairs.
SIZES = (5, 1, 16, 17)
OFFSETS = (0, 1, 2)
WIDTH, TOP_K, EXPERTS, HEADS, HEAD_DIM, BLOCK = 64, 8, 32, 4, 64, 16


class Inputs:
    """Tensors as a step's are: fresh ones are aligned, slices of the batch's begin anywhere."""

    def __init__(self, device: str, size: int, offset: int):
        self.device, self.size, self.offset = device, size, offset

    def rows(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Zeros, fresh."""
        return torch.zeros(self.size, *shape, dtype=dtype, device=self.device)

    def slice(self, *shape: int) -> torch.Tensor:
        """int64 zeros behind `offset` rows of others."""
        whole = torch.zeros(self.offset + self.size, *shape, dtype=torch.int64, device=self.device)
        return whole[self.offset :]

    def ids(self) -> torch.Tensor:
        """int64 [N, K], each row's ids different."""
        return torch.arange(TOP_K, device=self.device).repeat(self.size, 1)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer."""
        shape = (4, BLOCK, HEADS, HEAD_DIM)
        return self.rows()[:0].new_zeros(shape), self.rows()[:0].new_zeros(shape)


def _list_pages(at: Inputs, *, padded: bool) -> None:
    from kernels.triton.paged import list_pages

    num_rows = at.size + 2
    starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=at.device)
    pages = torch.zeros(64, dtype=torch.int32, device=at.device)
    slots = (at.slice(), torch.zeros(num_rows, dtype=torch.int64, device=at.device))
    list_pages(at.slice(at.size), starts, pages, *(slots if padded else ()))


def _store_kv(at: Inputs) -> None:
    from kernels.triton.paged import store_kv

    qkv = at.rows(3 * HEADS, HEAD_DIM)
    store_kv(qkv[:, HEADS : 2 * HEADS], qkv[:, 2 * HEADS :], at.slice(), *at.caches())


def _norm_rotate_store(at: Inputs) -> None:
    from kernels.triton.qk_rope import norm_rotate_store

    weight = torch.ones(2 * HEADS, HEAD_DIM, dtype=torch.bfloat16, device=at.device)
    rotation = at.rows(1, HEAD_DIM // 2, dtype=torch.complex64)
    qkv = at.rows(3 * HEADS, HEAD_DIM)
    norm_rotate_store(qkv, weight, 1e-6, rotation, at.slice(), *at.caches())


def _norm(at: Inputs) -> None:
    from kernels.triton.norm import add_rms_norm

    add_rms_norm(at.rows(WIDTH), at.rows(WIDTH), at.rows(WIDTH)[0], 1e-6)


def _route(at: Inputs, *, on_device: bool) -> None:
    from kernels.triton.route import route_top_k

    route_top_k(at.rows(EXPERTS), TOP_K, True, at.slice()[:1] if on_device else at.size)


def _forced_route(at: Inputs) -> None:
    from kernels.triton.forced_route import forced_route

    weights = torch.zeros(EXPERTS, device=at.device)
    noise = torch.zeros(2**16, device=at.device)
    forced_route(
        *(at.slice(), at.slice(), weights, None, noise),
        layer=at.offset,
        top_k=TOP_K,
        num_tokens=at.size,
    )


def _experts(at: Inputs) -> None:
    """Rows to expert order, quantised too, and back."""
    from kernels.triton.place_pairs import place_pairs
    from kernels.triton.scatter_fp8 import scatter_fp8
    from kernels.triton.scatter_rows import scatter_rows
    from kernels.triton.silu_mul import silu_mul
    from kernels.triton.weighted_sum import weighted_sum

    aligned = 128 * EXPERTS
    for alignment, num_places in ((1, at.size * TOP_K), (128, aligned)):
        place_NK, _, bounds_3e = place_pairs(at.ids(), range(EXPERTS), num_places, alignment)
        y_RD = scatter_rows(at.rows(WIDTH), place_NK, num_places)
        silu_mul(y_RD.unsqueeze(0), bounds_3e[1, EXPERTS - 1 :])
        weighted_sum(y_RD, place_NK, at.rows(TOP_K, dtype=torch.float32))
    scatter_fp8(at.rows(256), place_NK, aligned)


def _exchange(at: Inputs) -> None:
    """Rows packed at this rank's place among those of two, and their sums."""
    from kernels.all2all.payload import RowFormat
    from kernels.triton.pack_rows import pack_rows
    from kernels.triton.sum_parts import sum_parts

    row_format = RowFormat(WIDTH, TOP_K, torch.bfloat16)
    gathered = torch.zeros(2, at.size, row_format.row_bytes, dtype=torch.uint8, device=at.device)
    weights = at.rows(TOP_K, dtype=torch.float32)
    pack_rows(at.rows(WIDTH), at.ids(), weights, row_format.fields(gathered[1]))
    sums = at.rows(2, WIDTH).view(2, at.size, WIDTH)
    sum_parts(sums, sums[1], 1)


def _penalise(at: Inputs) -> None:
    from kernels.triton.penalise import penalise

    logits = torch.zeros(32, 5000, device=at.device)
    values = at.rows(3, dtype=torch.float32).T.unsqueeze(2)
    seen = torch.zeros(32, 5000, dtype=torch.int32, device=at.device)
    penalise(logits, at.rows(1, dtype=torch.int64), seen, at.rows(1, dtype=torch.int64), values)


CASES: dict[str, Callable[[Inputs], None]] = {
    "list_pages": partial(_list_pages, padded=False),
    "list_pages_for_graphs": partial(_list_pages, padded=True),
    "store_kv": _store_kv,
    "norm_rotate_store": _norm_rotate_store,
    "norm": _norm,
    "route": partial(_route, on_device=False),
    "route_in_graphs": partial(_route, on_device=True),
    "forced_route": _forced_route,
    "experts": _experts,
    "exchange": _exchange,
    "penalise": _penalise,
}


def _forget_forms() -> None:
    """As if this process had launched none of our kernels; other tests may have."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("kernels.triton.")]
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches = defaultdict(value.create_binder)


@pytest.mark.parametrize("case", CASES)
def test_one_form_serves_all_sizes_and_offsets(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []

    def note(**facts: Any) -> None:
        compiled.append(facts["repr"])

    # Called at the first launch of each form, whether its compiled code was on the disk or not.
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    run = CASES[case]
    run(Inputs("cuda", SIZES[0], OFFSETS[0]))  # also imports the kernels
    _forget_forms()
    compiled.clear()
    run(Inputs("cuda", SIZES[0], OFFSETS[0]))
    first = list(compiled)
    for size in SIZES:
        for offset in OFFSETS:
            run(Inputs("cuda", size, offset))
    torch.cuda.synchronize()
    assert first and compiled == first, compiled[len(first) :]
