"""What kernels with specialised warps share: steps around a ring, early launches, activations, blocks of tensors.

Written in Gluon. Kernels that import it also run as Python, see tests/triton/gluon_in_python.py.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}

# Triton 3.6 and later ones name the wait of a group's warps for each other differently.
sync_warps = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring and the phase, 0 or 1, of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def skip_stages(stage, phase, count, STAGES: gl.constexpr):
    """Return the stage and phase behind `count` stages."""
    stage += count
    return stage % STAGES, phase ^ (stage // STAGES & 1)


@gluon.jit
def wait_for_kernel_before():
    """Wait until the kernel before has ended; from here on, what it wrote can be read.

    Only a kernel that is launched early starts before (programmatic dependent launch).
    """
    wait: gl.constexpr = "griddepcontrol.wait; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(wait, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_kernel_after():
    """Let the programs of the next kernel start where there is room, if it is launched early."""
    start: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(start, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(pointer):
    """Bring 32 bytes behind a pointer that does not change into the L2 cache, without waiting for them."""
    fetch: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(fetch, "=r,l", [pointer], gl.int32, is_pure=False, pack=1)


@gluon.jit
def activate(gate, up, ACTIVATION: gl.constexpr):
    """Return activation(gate) * up of float32 values. `kernels.triton.gated_activation` has the same in Triton."""
    if ACTIVATION == "clamped_swiglu":
        gate = gl.minimum(gate, 7.0)
        up = gl.minimum(gl.maximum(up, -7.0), 7.0) + 1
        out = gate * (1 / (1 + gl.exp(-1.702 * gate)))
    elif ACTIVATION == "silu":
        out = gate * (1 / (1 + gl.exp(-gate)))
    elif ACTIVATION == "gelu":
        out = 0.5 * gate * (1 + gl.erf(gate * 0.7071067811865476))
    else:
        gl.static_assert(ACTIVATION == "gelu_tanh")
        out = gate * (1 / (1 + gl.exp(-1.5957691216057308 * gate * (1 + 0.044715 * gate * gate))))
    return out * up


def tiles_of(
    tensor: torch.Tensor,
    block: list[int],
    *,
    shape: list[int] | None = None,
    strides: list[int] | None = None,
) -> TensorDescriptor:
    """Return the blocks of a tensor in the layout of the tensor cores; `shape` and `strides` override the tensor's."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[tensor.dtype])
    return TensorDescriptor(
        tensor, shape or list(tensor.shape), strides or list(tensor.stride()), block, layout
    )
