"""Which kernel computes decodes that are cut into chunks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.batch import AttentionBatch
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec

decode_forms = pytest.importorskip("kernels.attention.decode_forms")
paged_decode = pytest.importorskip("kernels.triton.paged_decode")
pytest.importorskip("kernels.triton.warp_decode_fp8")
FP8 = AttentionSpec(32, 4, 128, 0.1, fp8_cache=True)


def forms(spec: AttentionSpec, *, block_size: int = 16, fast: bool = True) -> Any:
    return decode_forms.DecodeForms([spec], block_size, 132, fast=fast)


def test_many_rows_in_e4m3_take_single_warps() -> None:
    found, rows = forms(FP8), decode_forms.WARP_ROWS
    assert found.of(rows, shares=False) == paged_decode.E4M3_WARPS
    assert found.programs(rows, shares=False) == 16 * 132 // 4
    assert found.of(rows - 1, shares=False) == found.of(rows, shares=True) == paged_decode.E4M3
    assert found.programs(rows, shares=True) == 4 * 132 // 4


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"fp8_cache": False}, {}),
        ({"sinks": True}, {}),
        ({"head_dim": 64}, {}),
        ({}, {"block_size": 8}),
        ({}, {"fast": False}),
    ],
)
def test_others_take_programs_of_several_warps(
    change: dict[str, Any], options: dict[str, Any]
) -> None:
    spec = replace(FP8, **change)
    usual = paged_decode.E4M3 if spec.fp8_cache else paged_decode.HALF
    assert forms(spec, **options).of(128, shares=False) == usual


def test_a_cpu_is_one_processor() -> None:
    assert decode_forms.multiprocessors(torch.device("cpu")) == 1


class Shared:
    """Leading keys that all rows share."""

    def tokens_of_rows(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, 64, np.int32)


def test_a_form_for_shared_keys_has_lists_of_one_length() -> None:
    """A graph of it reads its lists at fixed places, also in steps in which no rows share keys."""
    attention: Any = TritonPagedAttention([FP8], 16)
    attention._forms = forms(FP8)
    rows = 2 * decode_forms.WARP_ROWS
    batch = AttentionBatch.dummy_decodes(rows, torch.device("cpu"))
    lengths = [
        [len(it) for it in attention._chunk_lists(batch, rows, shared, cuts=True, shares=True)]
        for shared in (None, Shared())
    ]
    assert lengths[0] == lengths[1]
    alone = attention._chunk_lists(batch, rows, None, cuts=True, shares=False)
    assert [len(it) for it in alone] != lengths[0], "single warps have more chunks"
