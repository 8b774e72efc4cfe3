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
from kernels.triton.pdl import MOST_ROWS, begin, dependent_launch
from kernels.triton.quantise_rows import SCALES_ALIGNMENT

# Groups of 128 values that a program computes: rows of a prompt's step are many and short. Few rows would leave nearly
# all SMs idle: 4 rows of 512 values took one program 2.1 us.
UNITS, UNITS_OF_FEW_ROWS = 32, 4


@triton.jit(do_not_specialize=["rows_per_group", "scale_stride"])
def gated_activation_fp8_kernel(
    h_ptr,
    counts_ptr,
    out_ptr,
    scale_ptr,
    rows_per_group,
    scale_stride,
    NUM_SCALES: tl.constexpr,
    COUNTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """UNITS units of 128 values of neighbouring rows: gate in the first half of h's row, up in the second."""
    begin(PDL)
    first, group = tl.program_id(0) * UNITS, tl.program_id(1)
    count = rows_per_group
    if COUNTED:
        count = tl.load(counts_ptr + group)
    if first < count * NUM_SCALES:
        unit = first + tl.arange(0, UNITS)
        row, scales = unit // NUM_SCALES, unit % NUM_SCALES
        inside = row < count
        at = group.to(tl.int64) * rows_per_group + row
        columns = scales[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        gate_at = h_ptr + at[:, None] * (2 * NUM_SCALES * GROUP) + columns
        gate = tl.load(gate_at, mask=inside[:, None], other=0).to(tl.float32)
        up_at = gate_at + NUM_SCALES * GROUP
        up = tl.load(up_at, mask=inside[:, None], other=0).to(tl.float32)
        quantised, scale = quantise(activate(gate, up, ACTIVATION))
        out_at = out_ptr + at[:, None] * (NUM_SCALES * GROUP) + columns
        tl.store(out_at, quantised, mask=inside[:, None])
        scale_at = scale_ptr + (group.to(tl.int64) * NUM_SCALES + scales) * scale_stride + row
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
    # The form changes once with the number of rows, see `dependent_launch`.
    units = UNITS_OF_FEW_ROWS if rows <= MOST_ROWS else UNITS
    if num_groups and rows:
        gated_activation_fp8_kernel[(triton.cdiv(rows * num_scales, units), num_groups)](
            h_GM2I,
            h_GM2I if counts_G is None else counts_G,
            out_GMI,
            scale_GSM,
            rows,
            stride,
            NUM_SCALES=num_scales,
            COUNTED=counts_G is not None,
            ACTIVATION=activation,
            UNITS=units,
            GROUP=GROUP,
            **dependent_launch(rows),
            num_warps=4,
        )
    return Fp8Rows(out_GMI, scale_GSM[..., :rows].transpose(1, 2))
