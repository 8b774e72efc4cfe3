"""The products that a start compiles for DeepGEMM, and what its pool of processes is given. Without DeepGEMM."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from kernels.grouped_gemm import deepgemm_kernels
from kernels.grouped_gemm.deepgemm_kernels import Product, compile_products, products_of, spread
from kernels.interface.backend import BackendShape

PRODUCTS = [Product(0, 128, 256, rows, True) for rows in (64, 128)]


class Pool:
    """Runs in this process."""

    def __init__(self, count: int, *_: Any):
        self.count = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def map(self, function: Callable[[Product], None], items: Iterable[Product]) -> Iterable[None]:
        return map(function, items)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Product]:
    """The products that a machine with one GPU has called."""
    found: list[Product] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(deepgemm_kernels, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(deepgemm_kernels, "_call", found.append)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    return found


def shape(num_ranks: int, num_experts: int = 8) -> BackendShape:
    return BackendShape(
        device="cuda",
        dtype=torch.bfloat16,
        num_ranks=num_ranks,
        hidden_size=256,
        moe_intermediate_size=128,
        num_experts=num_experts,
        top_k=2,
        max_num_tokens=512,
    )


def test_products_are_those_of_every_step_size() -> None:
    options: dict[str, Any] = {"fp8": True, "alignment": 128}
    found = products_of(shape(2), [(512, 256), (512, 256)], (512, 4), **options)
    assert found[:2] == [Product(0, 512, 256, rows, True) for rows in (512, 4)]
    # 512 tokens of each of 2 ranks have up to 2,048 rows for 4 experts; each expert begins at a multiple of 128.
    assert found[2:4] == [Product(4, 256, 256, 2432, True), Product(4, 256, 128, 2432, True)]
    assert [product.num_rows for product in found[4:]] == [512, 512]
    few = products_of(shape(2), [], (512, 4), fewest=3.0, **options)
    assert few == found[2:4], "another kernel multiplies 2 rows of an expert"


def test_ranks_with_other_numbers_of_experts() -> None:
    found = products_of(shape(3), [], (8,), fp8=False, alignment=128)
    assert {product.num_groups for product in found} == {2, 3}


def test_neighbours_are_compiled_far_apart() -> None:
    products = [Product(0, 128, 256, rows, True) for rows in range(100)]
    found = [product.num_rows for product in spread(products)]
    assert sorted(found) == list(range(100))
    first = sorted(found[:7])
    assert min(b - a for a, b in pairwise(first)) >= 8


def test_products_are_compiled_once(called: list[Product]) -> None:
    assert compile_products(PRODUCTS) >= 1
    assert sorted(called) == PRODUCTS
    assert compile_products(PRODUCTS[::-1]) == 0, "in any order"
    assert compile_products(PRODUCTS[:1]) == 1
    assert called == [*spread(PRODUCTS), PRODUCTS[0]]


def test_a_failure_is_tried_again(called: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(product: Product) -> None:
        raise RuntimeError("nvcc failed")

    with monkeypatch.context() as failing:
        failing.setattr(deepgemm_kernels, "_call", broken)
        with pytest.raises(RuntimeError, match="nvcc failed"):
            compile_products(PRODUCTS)
    assert compile_products(PRODUCTS) >= 1
