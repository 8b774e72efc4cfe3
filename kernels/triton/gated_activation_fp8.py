"""activation(gate) * up of each row, quantised to e4m3 in groups of 128; used rows alone.

G groups of M rows each, the used rows first; I the width of gate and of up;
S = I / 128 scales of a row.
"""

import torch
import triton
import triton.language as tl

from kernels.activation import Activation
from kernels.block_fp8 import Fp8Rows
from kernels.triton.fp8 import GROUP, quantise
from kernels.triton.gated_activation import activate
from kernels.triton.quantise_rows import SCALES_ALIGNMENT


@triton.jit(do_not_specialize=["rows_per_group", "scale_stride"])
def gated_activation_fp8_kernel(
    h_ptr,
    counts_ptr,
    out_ptr,
    scale_ptr,
    rows_per_group,
    scale_stride,
    num_scales,
    COUNTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One row: gate in the first half of h's row, up in the second."""
    row, group = tl.program_id(0), tl.program_id(1)
    count = rows_per_group
    if COUNTED:
        count = tl.load(counts_ptr + group)
    if row < count:
        at = group.to(tl.int64) * rows_per_group + row
        scales = tl.arange(0, BLOCK_S)
        inside = scales < num_scales
        columns = scales[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        gate_at = h_ptr + at * 2 * num_scales * GROUP + columns
        gate = tl.load(gate_at, mask=inside[:, None], other=0).to(tl.float32)
        up = tl.load(gate_at + num_scales * GROUP, mask=inside[:, None], other=0).to(tl.float32)
        quantised, scale = quantise(activate(gate, up, ACTIVATION))
        tl.store(out_ptr + at * num_scales * GROUP + columns, quantised, mask=inside[:, None])
        scale_at = scale_ptr + (group.to(tl.int64) * num_scales + scales) * scale_stride + row
        tl.store(scale_at, scale, mask=inside)


def gated_activation_fp8(
    h_GM2I: torch.Tensor, counts_G: torch.Tensor | None, activation: Activation
) -> Fp8Rows:
    """e4m3 [G, M, I] and float32 scales [G, M, S], contiguous along M; see `gated_activation`. No counts: all rows."""
    num_groups, rows, width = h_GM2I.shape[0], h_GM2I.shape[1], h_GM2I.shape[2] // 2
    assert h_GM2I.is_contiguous() and (counts_G is None or len(counts_G) == num_groups)
    assert width % GROUP == 0, width
    num_scales, device = width // GROUP, h_GM2I.device
    stride = -(-rows // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
    out_GMI = torch.empty(num_groups, rows, width, dtype=torch.float8_e4m3fn, device=device)
    scale_GSM = torch.empty(num_groups, num_scales, stride, dtype=torch.float32, device=device)
    if num_groups and rows:
        gated_activation_fp8_kernel[(rows, num_groups)](
            h_GM2I,
            h_GM2I if counts_G is None else counts_G,
            out_GMI,
            scale_GSM,
            rows,
            stride,
            num_scales,
            COUNTED=counts_G is not None,
            ACTIVATION=activation,
            BLOCK_S=triton.next_power_of_2(num_scales),
            GROUP=GROUP,
            num_warps=4,
        )
    return Fp8Rows(out_GMI, scale_GSM[..., :rows].transpose(1, 2))
