"""What a GPU's routing and products say before there is a GPU: bounds of places, reasons of absence."""

import importlib
import itertools
import sys

import pytest
import torch

from kernels.block_fp8 import quantise_blocks
from kernels.grouped_gemm import deepgemm_package
from kernels.host import triton_version
from kernels.routing.device_routing import identity_routing, max_permuted
from kernels.routing.permute import Permutation, Routing


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize(("num_rows", "top_k", "num_local"), [(3, 2, 2), (5, 3, 1), (2, 1, 3)])
def test_max_permuted_is_what_the_worst_routing_takes(num_rows, top_k, num_local, alignment):
    """Over every choice of up to `top_k` different local experts by every row."""
    choices = [
        chosen
        for size in range(min(top_k, num_local) + 1)
        for chosen in itertools.combinations(range(num_local), size)
    ]
    worst = 0
    for rows in itertools.product(choices, repeat=num_rows):
        counts = [sum(expert in chosen for chosen in rows) for expert in range(num_local)]
        worst = max(worst, sum(-(-count // alignment) * alignment for count in counts))
    assert max_permuted(num_rows, top_k, num_local, alignment) >= worst
    assert alignment > 1 or max_permuted(num_rows, top_k, num_local) == worst


def test_rows_in_order_are_their_own_places():
    routing = identity_routing(torch.tensor([2, 2, 5], dtype=torch.int32), 5)
    assert routing.starts_e.tolist() == [0, 2, 2] and routing.ends_e.tolist() == [2, 2, 5]
    assert routing.row_R.tolist() == list(range(5)) and routing.num_permuted == 5
    none = identity_routing(torch.empty(0, dtype=torch.int32), 0)
    assert none.starts_e.shape == (0,) and none.num_permuted == 0


def test_the_order_routes_on_the_cpu():
    order = Permutation(range(1, 3), num_experts=4, device="cpu")
    routing = order.route(torch.tensor([[2, 0], [1, -1], [2, 3]], dtype=torch.int32))
    assert isinstance(routing, Routing)
    assert routing.row_R.tolist() == [1, 0, 2] and routing.offs_e.tolist() == [1, 3]
    with pytest.raises(AssertionError):
        Permutation(range(1), num_experts=1, device="cpu", alignment=128)


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        (None, "triton is not installed, 3.4 or newer"),
        ("3.3.1", "triton 3.3.1 is installed, 3.4 or newer"),
        ("3.4.0", None),
        ("3.6.0+git", None),
        ("4.0", None),
    ],
)
def test_triton_is_looked_for_by_version(monkeypatch, installed, says):
    def version(name: str) -> str:
        if installed is None:
            raise triton_version.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(triton_version, "version", version)
    found = triton_version.triton_unavailable()
    assert found is None if says is None else says in found


def test_a_deep_gemm_that_is_too_old_is_named(tmp_path, monkeypatch):
    (tmp_path / "deep_gemm.py").write_text("def gemm_fp8_fp8_bf16_nt(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setattr(deepgemm_package, "version", lambda name: "0.0.1")
    says = r"sgl-deep-gemm 0.0.1 is installed, sgl-deep-gemm 0.1.4.* no m_grouped_bf16_gemm_nt_cont"
    with pytest.raises(deepgemm_package.DeepGemmUnavailableError, match=says):
        deepgemm_package.load_deep_gemm()
    monkeypatch.delitem(sys.modules, "deep_gemm")
    (tmp_path / "deep_gemm.py").write_text("raise OSError('undefined symbol: _ZN3c10')\n")
    importlib.invalidate_caches()
    with pytest.raises(
        deepgemm_package.DeepGemmUnavailableError, match=r"with torch .*: undefined symbol"
    ):
        deepgemm_package.load_deep_gemm()


def test_blocks_are_quantised_by_themselves():
    """A large value in one 128x128 block costs the others nothing; zeros stay zeros."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 256, 384, generator=generator).bfloat16()
    weights[1, 130, 300] = 9984
    weights[0, :128, :128] = 0
    rounded = quantise_blocks(weights)
    assert rounded.values.dtype == torch.float8_e4m3fn and rounded.scales.shape == (2, 2, 3)
    assert rounded.scales.dtype == torch.float32
    scales = rounded.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    back = rounded.values.float() * scales
    assert not back[0, :128, :128].any()
    assert back[1, 130, 300] == pytest.approx(9984)
    assert back[1, 128:, 256:].count_nonzero() < 128 * 128
    weights = weights.float()
    back[1, 128:, 256:] = weights[1, 128:, 256:]
    # e4m3 keeps 3 bits behind the leading one.
    assert ((back - weights).abs() <= weights.abs() / 16 + 4 / 448 / 2**6).all()
