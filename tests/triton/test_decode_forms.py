"""Which kernel computes decodes that are cut into chunks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

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
