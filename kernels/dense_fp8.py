"""Dense products with FP8 weights on GPUs: DeepGEMM multiplies, a kernel of ours few rows; Triton quantises rows.

A backend of the experts' products states whether these products can run (`GroupedGemm.fp8_dense`).

T rows, K input width, N output width.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kernels.activation import Activation
from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.grouped_gemm.deepgemm_package import load_deep_gemm
from kernels.host.hopper import on_hopper


def quantise(x_TK: torch.Tensor) -> Fp8Rows:
    """Return rows, maybe strided, in FP8."""
    from kernels.triton.quantise_rows import quantise_rows

    return quantise_rows(x_TK)


def activate(h_T2I: torch.Tensor, activation: Activation) -> Fp8Rows:
    """Return activation(gate) * up in FP8, of rows of gate, then up."""
    from kernels.triton.gated_activation_fp8 import gated_activation_fp8

    values_1TI, scales_1TS = gated_activation_fp8(h_T2I.unsqueeze(0), None, activation)
    return Fp8Rows(values_1TI.squeeze(0), scales_1TS.squeeze(0))


def multiply(x_TK: Fp8Rows, weights_NK: BlockWeights, *, partial: bool = False) -> torch.Tensor:
    """Return x @ weights.T, bfloat16 [T, N]. N is a multiple of 64, K of 128.

    partial   allow float32 sums over parts of K, [P, T, N], for `sum_partials`
    """
    skinny = _skinny()
    parts = 1 if skinny is None else skinny.parts_of(weights_NK)
    if skinny is not None and (parts == 1 or partial) and skinny.takes(x_TK, weights_NK, parts):
        found: torch.Tensor = skinny.skinny_fp8(x_TK, weights_NK, parts)
        return found
    values = x_TK.values
    out_TN = torch.empty(
        len(values), len(weights_NK.values), dtype=torch.bfloat16, device=values.device
    )
    if len(values):
        _deep_gemm().fp8_gemm_nt(tuple(x_TK), (weights_NK.values, weights_NK.scales), out_TN)
    return out_TN


def compile_products(
    weights: Iterable[BlockWeights], sizes: Sequence[int], rank: int, num_ranks: int
) -> None:
    """Run the products of every shape of `weights` with `sizes` rows, because DeepGEMM compiles a kernel for each tile.

    Each rank begins with other sizes: it finds what another rank of its host has compiled.
    """
    shapes = {found.shape: found for found in weights}
    calls = [(found, rows) for found in shapes.values() for rows in sizes]
    start = len(calls) * rank // num_ranks
    for found, rows in calls[start:] + calls[:start]:
        x = torch.zeros(rows, found.shape[1], dtype=torch.bfloat16, device=found.values.device)
        for partial in (False, True):
            multiply(quantise(x), found, partial=partial)


@functools.cache
def _skinny() -> Any:
    """Return the module of products of few rows, None where its kernel cannot run."""
    if not on_hopper():
        return None
    from kernels.triton import hopper_skinny_fp8

    return hopper_skinny_fp8


@functools.cache
def _deep_gemm() -> Any:
    return load_deep_gemm()
