"""Keys of a page table as the Triton kernels of decodes read them: K, V and exponents of a tile of keys of one KV head.

Pages in e4m3 (kernels/attention/fp8_pages.py) stay packed in words until they become float16: moved one by one their
bytes took half of all instructions.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    caches,
    block,
    key,
    seen,
    head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    FP8: tl.constexpr,
):
    """Return K and V of these keys as they lie in the cache, and their exponents, without FP8 any numbers."""
    k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr = caches
    unit: tl.constexpr = 4 if k_ptr.dtype.element_ty == tl.int32 else 1
    value, offset = tl.arange(0, HEAD_DIM_2 // unit), key % BLOCK_SIZE
    row = block * (BLOCK_SIZE * HEADS) + offset * HEADS + head
    at = row[:, None] * (HEAD_DIM // unit) + value[None, :]
    exponent_at = block * (HEADS * BLOCK_SIZE) + head * BLOCK_SIZE + offset
    mask = seen[:, None] & (value < HEAD_DIM // unit)[None, :]
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + at, mask=mask, other=0.0)
    k_exponent, v_exponent = key, key
    if FP8:
        k_exponent = tl.load(k_exponents_ptr + exponent_at, mask=seen, other=127).to(tl.int32)
        v_exponent = tl.load(v_exponents_ptr + exponent_at, mask=seen, other=127).to(tl.int32)
    return k, v, k_exponent, v_exponent


@triton.jit
def blocks_of(table_ptr, key, end, BLOCK_SIZE: tl.constexpr):
    return tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
