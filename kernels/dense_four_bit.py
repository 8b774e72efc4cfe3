"""Dense products with weights in four bits: our Triton kernel on GPUs, compiled C on CPUs.

Of many rows a library multiplies a copy of the weights in the rows' dtype. A backend of the experts' products states
whether these products can run (`GroupedGemm.four_bit`).

T rows, K input width, N output width.
"""

import ctypes
import functools
from typing import Any

import torch
from torch.nn import functional as F

from kernels.four_bit import FourBitWeights
from kernels.grouped_gemm.native_four_bit import EXPANDED, FourBitPointers
from kernels.native.library import load
from kernels.pending import can_yield_ubatch

# A CPU expands the matrix once for more rows and calls a library; of fewer rows C expands four rows at a time.
MOST_NATIVE_ROWS = 32
# With more rows a GPU multiplies a copy in bfloat16, see docs/results/gpu-four-bit.md.
MOST_PACKED_ROWS = 128


def prepare(weights_NK: FourBitWeights) -> None:
    """Make what products of these weights share, which no graph may make."""
    if weights_NK.values.is_cuda:
        _shared(weights_NK.values.device)


def multiply(
    x_TK: torch.Tensor, weights_NK: FourBitWeights, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weights.T + bias, a new tensor [T, N] in x's dtype.

    x         rows maybe strided
    weights   tiled on GPUs; N and K are multiples of 64
    bias      None: zeros
    """
    if x_TK.is_cuda:
        return _on_gpu(x_TK, weights_NK, bias_N)
    if len(x_TK) > MOST_NATIVE_ROWS:
        return F.linear(x_TK, weights_NK.matrix().dequantise().to(x_TK.dtype), bias_N)
    y_TN = _on_cpu(x_TK.float().contiguous(), weights_NK).to(x_TK.dtype)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def _on_cpu(x_TK: torch.Tensor, weights: FourBitWeights) -> torch.Tensor:
    rows, columns = weights.shape
    y_TN = torch.empty(len(x_TK), rows)
    scratch = torch.empty((EXPANDED + len(x_TK)) * columns)
    found = FourBitPointers.of(weights)
    load().four_bit_linear(
        x_TK.data_ptr(),
        ctypes.addressof(found),
        int(weights.format.kind == "int4"),
        weights.format.group,
        *(len(x_TK), columns, rows),
        y_TN.data_ptr(),
        scratch.data_ptr(),
    )
    return y_TN


def _on_gpu(
    x_TK: torch.Tensor, weights: FourBitWeights, bias_N: torch.Tensor | None
) -> torch.Tensor:
    from kernels.triton.expand_four_bit import expand_four_bit

    if len(x_TK) > MOST_PACKED_ROWS:
        return F.linear(x_TK, expand_four_bit(weights, x_TK.dtype), bias_N)
    return multiply_packed(x_TK, weights, bias_N)


def multiply_packed(
    x_TK: torch.Tensor,
    weights_NK: FourBitWeights,
    bias_N: torch.Tensor | None = None,
    tile: Any = None,
) -> torch.Tensor:
    """Return `multiply` on a GPU by the kernel that expands weights in registers.

    x      up to MOST_PACKED_ROWS rows
    tile   a kernels.triton.four_bit_tiles.FourBitTile; None: the fastest
    """
    from kernels.triton.four_bit_tiles import dense_tile
    from kernels.triton.grouped_gemm_four_bit import grouped_gemm_four_bit

    num_rows, outputs = len(x_TK), weights_NK.shape[0]
    first, ends, num_sms, counters = _shared(x_TK.device)
    return grouped_gemm_four_bit(
        *(x_TK, None, weights_NK.as_one_expert(), first, ends[num_rows], num_rows),
        activation=None,
        tile=tile or dense_tile(num_rows, x_TK.dtype, outputs, num_sms),
        num_sms=num_sms,
        bias=None if bias_N is None else bias_N.unsqueeze(0),
        counters=None if can_yield_ubatch() else counters,
    )


@functools.cache
def _shared(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the first row of the only expert, its end for each number of rows as [1], the SMs, and counters.

    A graph cannot hold a copy of a number from the host. Places are 16 bytes apart, because Triton compiles anew for
    others. Products take turns at the counters, as outside of ubatches all run on one stream at a time.
    """
    from kernels.triton.split_depth import new_counters

    ends = torch.arange(MOST_PACKED_ROWS + 1, dtype=torch.int32, device=device)
    spread = ends.unsqueeze(1).expand(-1, 4).contiguous()
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return spread[0, :1], spread[:, :1], sms, new_counters(device)
