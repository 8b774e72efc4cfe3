"""What is done to whole rows: packed for the exchange, summed over ranks, activated, quantised."""

from functools import partial
from typing import Any

import pytest
import torch

from kernels.activation import ACTIVATIONS, Activation
from kernels.all2all.payload import RowFormat
from kernels.gated_activation import gated_activation as expected_activation
from kernels.triton import gated_activation_fp8 as gated_activation_fp8_module
from kernels.triton import pdl
from kernels.triton.gated_activation import gated_activation
from kernels.triton.gated_activation_fp8 import gated_activation_fp8
from kernels.triton.pack_rows import pack_rows
from kernels.triton.quantise_rows import quantise_rows
from kernels.triton.scatter_fp8 import scatter_fp8
from tests.closeness import assert_near
from tests.triton.device import COMPILED, DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of one rounding; the interpreter cuts bfloat16 off instead.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 1e-3}
close = partial(assert_near, tolerances=TOLERANCE)
# Of rounding to 3 bits. The interpreter loses the carry of some of those that round up to the next power of two.
E4M3_TOLERANCE = 2.0**-4 if COMPILED else 0.51


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "hidden", "top_k"), [(0, 8, 2), (5, 40, 3), (3, 5001, 8)])
def test_pack_rows(num_rows: int, hidden: int, top_k: int, dtype: torch.dtype):
    """Fields are what was packed, of strided rows too; padding between them is nobody's."""
    row_format = RowFormat(hidden, top_k, dtype)
    wide = randn(num_rows, hidden + 3, dtype=dtype)
    ids = torch.arange(num_rows * top_k, device=DEVICE).view(num_rows, top_k) - 1
    weights = randn(num_rows, top_k)
    rows = torch.zeros(num_rows, row_format.row_bytes, dtype=torch.uint8, device=DEVICE)
    fields = row_format.fields(rows)
    pack_rows(wide[:, :hidden], ids, weights, fields)
    for field, value in zip(fields, (wide[:, :hidden], ids.int(), weights), strict=True):
        assert torch.equal(field, value)
    pack_rows(fields[0], ids + 1, -weights, fields)
    for field, value in zip(fields, (wide[:, :hidden], ids.int() + 1, -weights), strict=True):
        assert torch.equal(field, value), "x is there already, ids and weights are not"


@pytest.mark.parametrize(("num_rows", "groups"), [(0, 1), (3, 3), (2, 35)])
def test_pack_rows_in_fp8(num_rows: int, groups: int):
    """Values and scales are of `quantise_rows`; rows of more values than a program packs too."""
    hidden, top_k = groups * 128, 3
    row_format = RowFormat(hidden, top_k, torch.bfloat16, fp8=True)
    wide = randn(num_rows, hidden + 8, dtype=torch.bfloat16)
    ids = torch.arange(num_rows * top_k, device=DEVICE).view(num_rows, top_k) - 1
    weights = randn(num_rows, top_k)
    rows = torch.zeros(num_rows, row_format.row_bytes, dtype=torch.uint8, device=DEVICE)
    fields = row_format.fields(rows)
    pack_rows(wide[:, :hidden], ids, weights, fields)
    values, scales = quantise_rows(wide[:, :hidden])
    assert torch.equal(fields[0].values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(fields[0].scales, scales)
    assert torch.equal(fields[1], ids.int()) and torch.equal(fields[2], weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 768])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(activation: Activation, width: int, dtype: torch.dtype):
    """As far as each group has rows."""
    h = randn(3, 8, 2 * width, dtype=dtype)
    counts = torch.tensor([0, 8, 5], dtype=torch.int32, device=DEVICE)
    found = gated_activation(h, counts, activation)
    expected = expected_activation(h.float(), activation)
    for group, count in enumerate(counts.tolist()):
        close(found[group, :count], expected[group, :count])


def check_quantised(values: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> None:
    """A scale per group of 128 takes its largest value to 448, the largest of e4m3."""
    groups = expected.unflatten(-1, (-1, 128))
    torch.testing.assert_close(scales, groups.abs().amax(-1).clamp(1e-4) / 448)
    kept = values.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)
    torch.testing.assert_close(kept, groups, atol=2e-4, rtol=E4M3_TOLERANCE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation_fp8(activation: Activation):
    h = randn(2, 8, 2 * 384, dtype=torch.bfloat16)
    h[0, 1] = 0
    counts = torch.tensor([3, 8], dtype=torch.int32, device=DEVICE)
    values, scales = gated_activation_fp8(h, counts, activation)
    expected = expected_activation(h.float(), activation)
    assert values.dtype == torch.float8_e4m3fn and scales.stride(1) == 1
    for group, count in enumerate(counts.tolist()):
        where = (group, slice(count))
        check_quantised(values[where], scales[where], expected[where])


@pytest.mark.parametrize("num_rows", [1, 6, 64, 65])
def test_gated_activation_fp8_of_all_rows(num_rows: int):
    """Without counts, and of any number of rows; scales of a group begin at 16 bytes."""
    h = randn(1, num_rows, 2 * 256, dtype=torch.bfloat16)
    values, scales = gated_activation_fp8(h, None, "silu")
    assert scales.shape == (1, num_rows, 2)
    assert scales.stride(1) == 1 and scales.stride(2) % 4 == 0
    check_quantised(values, scales, expected_activation(h.float(), "silu"))


def test_few_rows_are_activated_by_several_programs_that_start_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 rows of 512 values are 16 groups; the form of a launch changes once with the number of rows."""
    launches: list[tuple[int, int, bool]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *_, **constants: launches.append(
                (grid[0], constants["UNITS"], constants["launch_pdl"])
            )

    monkeypatch.setattr(gated_activation_fp8_module, "gated_activation_fp8_kernel", Recorder())
    monkeypatch.setattr(pdl, "supported", lambda: True)
    for num_rows in (4, pdl.MOST_ROWS, pdl.MOST_ROWS + 1):
        gated_activation_fp8(randn(1, num_rows, 2 * 512, dtype=torch.bfloat16), None, "silu")
    assert launches == [(4, 4, True), (pdl.MOST_ROWS, 4, True), (9, 32, False)]


def test_scatter_fp8():
    """Every row at each of its places, -1 goes nowhere."""
    groups = 35  # three programs a row
    x = randn(5, groups * 128 + 8, dtype=torch.bfloat16)[:, : groups * 128]
    places = [[3, 0], [-1, 7], [1, 2], [-1, -1], [4, 6]]
    place = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    values, scales = scatter_fp8(x, place, 8)
    assert values.shape == (8, x.shape[1]) and scales.shape == (8, groups)
    assert scales.stride(0) == 1
    for row, its_places in enumerate(places):
        for at in filter(lambda place: place >= 0, its_places):
            check_quantised(values[at], scales[at], x[row].float())
    quantised = quantise_rows(x)
    copied, copied_scales = scatter_fp8(quantised.values, place, 8, quantised.scales)
    used = [at for its_places in places for at in its_places if at >= 0]
    assert torch.equal(copied[used].float(), values[used].float())
    assert torch.equal(copied_scales[used], scales[used])
