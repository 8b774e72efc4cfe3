"""The gated activation of each used row, in one launch.

G groups of M rows each, the used rows first; I the width of gate and of up.
"""

import torch
import triton
import triton.language as tl

from kernels.activation import Activation


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up of float32 values."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1
        out = gate * tl.sigmoid(1.702 * gate)
    elif ACTIVATION == "silu":
        out = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        out = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(x)) / 2 is sigmoid(2x); the factor is 2 * sqrt(2 / pi)
        out = gate * tl.sigmoid(1.5957691216057308 * gate * (1 + 0.044715 * gate * gate))
    return out * up


@triton.jit(do_not_specialize=["rows_per_group"])
def gated_activation_kernel(
    h_ptr,
    counts_ptr,
    out_ptr,
    rows_per_group,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: gate in the first half of h's row, up in the second."""
    row, group = tl.program_id(0), tl.program_id(1)
    if row < tl.load(counts_ptr + group):
        at = group.to(tl.int64) * rows_per_group + row
        columns = tl.arange(0, BLOCK)
        gate_at = h_ptr + at * 2 * width + columns
        gate = tl.load(gate_at, mask=columns < width, other=0).to(tl.float32)
        up = tl.load(gate_at + width, mask=columns < width, other=0).to(tl.float32)
        out = activate(gate, up, ACTIVATION)
        out_at = out_ptr + at * width + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=columns < width)


def gated_activation(
    h_GM2I: torch.Tensor, counts_G: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """[G, M, I] in h's dtype; group g's rows from counts_G[g] (int32) on stay undefined."""
    num_groups, rows, width = h_GM2I.shape[0], h_GM2I.shape[1], h_GM2I.shape[2] // 2
    assert h_GM2I.is_contiguous() and len(counts_G) == num_groups
    out_GMI = torch.empty(num_groups, rows, width, dtype=h_GM2I.dtype, device=h_GM2I.device)
    block = triton.next_power_of_2(width)
    if num_groups and rows:
        gated_activation_kernel[(rows, num_groups)](
            *(h_GM2I, counts_G, out_GMI, rows, width),
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=4 if block > 512 else 1,
        )
    return out_GMI
