"""Hopper's product of many rows against float32: on such a GPU compiled, without any GPU as Python.

That it compiles for Hopper, and fits an SM, is tested in test_forms.py.
"""

from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from kernels.activation import ACTIVATIONS, Activation
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.host.hopper import on_hopper
from kernels.triton.grouped_gemm import TileShape, grouped_gemm
from tests.closeness import calc_diff
from tests.triton.device import COMPILED, DEVICE, FOR_HOPPER, compiled_only
from tests.triton.gluon_in_python import in_python

pytestmark = pytest.mark.skipif(not FOR_HOPPER, reason="needs a Hopper GPU")

NAME = "kernels.triton.hopper_gemm"
TOLERANCE = {torch.bfloat16: 2e-5, torch.float16: 1e-6}
# Rows of each expert: none, one, around the halves of a tile and whole ones.
EDGES = [0, 1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 256, 300, 0]
COUNTS = {"edges": EDGES, "one": [300], "nobody": [0, 0, 0]}
if COMPILED:
    COUNTS |= {"many": [40 + 7 * i for i in range(64)], "even": [1024] * 8}


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    return pytest.importorskip(NAME) if COMPILED else in_python(NAME)


def _place(counts: list[int], gap: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Starts and ends of experts' places with `gap` places of nobody behind each, and how many there are in all."""
    ends = torch.tensor(counts).add(gap).cumsum(0).to(DEVICE, torch.int32) - gap
    starts = ends - torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    return starts, ends, int(ends[-1]) + gap


@pytest.mark.parametrize(("gap", "num_sms"), [(0, 1), (37, 5), (0, 132)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCE if COMPILED else [torch.bfloat16])
@pytest.mark.parametrize(
    ("gated", "indexed", "shape"),
    [
        (True, True, (40, 64)),
        (True, True, (136, 320)),
        (True, False, (136, 200)),
        (False, True, (512, 128)),
        (False, False, (72, 40)),
        (False, False, (264, 320)),
        *compiled_only((True, True, (768, 2048)), (True, False, (768, 2048))),
        *compiled_only((False, False, (2048, 768))),
    ],
)
@torch.inference_mode()
def test_equals_float32(hopper, gated, indexed, shape, dtype, counts, gap, num_sms):
    """Widths and depths of whole tiles and of parts; rows come by an index or in order."""
    activation = "silu" if gated else None
    check(hopper, activation, indexed, shape, dtype, counts, gap, num_sms)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clamped_swiglu"])
@torch.inference_mode()
def test_other_activations_equal_float32(hopper, activation):
    check(hopper, activation, True, (136, 320), torch.bfloat16, [1, 0, 65, 300], 37, 5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(activation: Activation):
    """As exact as the difference of gelu and its approximation needs, which bfloat16 outputs hide."""
    gate, up = torch.linspace(-12, 12, 1001), torch.linspace(9, -9, 1001)
    expected = gated_activation(torch.cat((gate, up)), activation)
    found = in_python(NAME).activate(gate, up, activation)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def check(
    hopper: ModuleType,
    activation: Activation | None,
    indexed: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    counts: list[int],
    gap: int,
    num_sms: int,
) -> None:
    """Compare the kernel with a float32 product of each expert's rows; activation None: not gated."""
    gated = activation is not None
    width, depth = shape
    generator = torch.Generator(DEVICE).manual_seed(len(counts) + gap)
    new = {"generator": generator, "device": DEVICE}
    starts, ends, num_permuted = _place(counts, gap)
    weights = torch.randn(len(counts), width * (2 if gated else 1), depth, **new) / depth**0.5
    x = torch.randn(500 if indexed else num_permuted, depth, **new).to(dtype)
    row_R = torch.randint(500, (num_permuted,), dtype=torch.int32, **new) if indexed else None
    weights = weights.to(dtype)
    tile = hopper.HopperTile(128, 4) if gated else hopper.HopperTile(256, 3)
    out = grouped_gemm(
        *(x, row_R, weights, starts, ends, num_permuted),
        activation=activation,
        tile=tile,
        num_sms=num_sms,
    )
    assert out.shape == (num_permuted, width) and out.dtype == dtype
    ordered = x if row_R is None else x[row_R.long()]
    for expert, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        expected = F.linear(ordered[start:end].float(), weights[expert].float())
        if activation is not None:
            expected = gated_activation(expected, activation)
        if end > start:
            assert calc_diff(out[start:end], expected) < TOLERANCE[dtype]


@pytest.mark.skipif(not on_hopper(), reason="needs a GPU")
@torch.inference_mode()
def test_is_captured_in_a_graph_and_never_waits_for_the_device(hopper):
    starts, ends, num_permuted = _place([1024] * 8, 0)
    x = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    row_R = torch.randint(2048, (num_permuted,), dtype=torch.int32, device=DEVICE)
    weights = torch.randn(8, 1536, 2048, device=DEVICE, dtype=torch.bfloat16) / 45

    def product() -> torch.Tensor:
        tile = hopper.HopperTile(128, 4)
        bounds = (starts, ends, num_permuted)
        return grouped_gemm(x, row_R, weights, *bounds, activation="silu", tile=tile, num_sms=132)

    eager = product()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        product()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product()
    ends.sub_(100)  # the next replay has fewer rows
    graph.replay()
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        assert torch.equal(out[start:end], eager[start:end])


@pytest.mark.parametrize(
    ("rows", "many"), [(8, (False, False)), (256, (False, True)), (1024, (True, True))]
)
def test_takes_the_place_of_the_other_where_experts_have_many_rows(rows, many):
    """And rows whose copies would not be whole are left to the other, which says nothing of alignment."""
    gemm = TritonGroupedGemm(num_sms=132, hopper=True)

    class Routing:
        expected, ends_e = 8 * rows, range(8)

    def chosen(x: torch.Tensor) -> tuple[bool, ...]:
        tiles = gemm._tiles(Routing(), x, torch.zeros(1))
        return tuple(not isinstance(tile, TileShape) for tile in tiles)

    x = torch.zeros(4, 192, device=DEVICE, dtype=torch.bfloat16)
    assert chosen(x) == many
    assert chosen(x[:, 4:132]) == chosen(x[:, :100]) == (False, many[1])
    assert chosen(x.float()) == (False, False)
