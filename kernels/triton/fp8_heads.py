"""K and V rounded to e4m3 with a power-of-two scale for each token and head (kernels/attention/fp8_pages.py).

T tokens, h KV heads, d head dim.
"""

import torch
import triton
import triton.language as tl
from triton import knobs

# bfloat16 of the four e4m3 values of a word; NaN becomes 480. The bits of a value in the place of a bfloat16's sign,
# lowest exponent bits and highest mantissa bits are the value times 2^-120, also below the smallest normal number.
E4M3_TO_BFLOATS = tl.constexpr("""{
    .reg .b32 low, high, part, factor, zero;
    mov.b32 factor, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $4, 0, 0x1404;
    prmt.b32 high, $4, 0, 0x3424;
    shr.u32 part, low, 4;
    and.b32 part, part, 0x07f007f0;
    lop3.b32 low, low, 0x80008000, part, 0xea;
    shr.u32 part, high, 4;
    and.b32 part, part, 0x07f007f0;
    lop3.b32 high, high, 0x80008000, part, 0xea;
    fma.rn.bf16x2 low, low, factor, zero;
    fma.rn.bf16x2 high, high, factor, zero;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
    }""")


@triton.jit
def power_of_two(exponent):
    """float32 of biased exponents in int32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_e4m3(x):
    """Round float32 of less than 2^8 to the nearest e4m3, ties to even, and stay in float32.

    The conversion of values that were just converted to e4m3 gave wrong values on an H200 (Triton 3.6). A sum with
    1.5 * 2^20 times x's power of two, or that of the smallest normal e4m3, keeps three bits behind the leading one.
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    large = 1.5 * power_of_two(tl.maximum(exponent, 121) + 20)
    return (x + large) - large


@triton.jit
def round_heads(x):
    """[h, d] -> e4m3 of the same shape, biased exponents int32 [h], the rounded values in float32."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 7
    exponent = tl.minimum(tl.maximum(exponent, 32), 247)  # see fp8_pages
    rounded = _round_e4m3(x * power_of_two(254 - exponent)[:, None])
    return rounded.to(tl.float8e4nv), exponent, rounded * power_of_two(exponent)[:, None]


@triton.jit
def _halves(words):
    """int32 [N, W] -> float16 [N, 4 W], the e4m3 values of each word in order of memory."""
    a, b, c, d = tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 first, second;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        mov.b32 {$0, $1}, first;
        mov.b32 {$2, $3}, second;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )
    joined = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(joined, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def e4m3_values(x, dtype):
    """Return the values of words or of e4m3 in `dtype`."""
    if x.dtype == tl.int32:
        x = _halves(x)
    return x.to(dtype)


@triton.jit
def place_exponents(exponents_ptr, exponent, slot, head, NUM_HEADS, BLOCK_SIZE):
    """Store the exponents of a token's heads from 0 to NUM_HEADS - 1; slot -1: none."""
    place = (slot // BLOCK_SIZE * NUM_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    is_head = (head >= 0) & (head < NUM_HEADS) & (slot >= 0)
    tl.store(exponents_ptr + place, exponent.to(tl.uint8), mask=is_head)


@triton.jit
def place_both(exponents, exponent, slot, head, NUM_HEADS, BLOCK_SIZE):
    """Store the exponents of a token's heads of K, which begin with head 0, and of V behind them."""
    k_exponents_ptr, v_exponents_ptr = exponents
    place_exponents(k_exponents_ptr, exponent, slot, head, NUM_HEADS, BLOCK_SIZE)
    place_exponents(v_exponents_ptr, exponent, slot, head - NUM_HEADS, NUM_HEADS, BLOCK_SIZE)


@triton.jit(do_not_specialize=["slots_ptr", "num_tokens"])
def _store_fp8(
    x_ptr,
    x_row,
    slots_ptr,
    num_tokens,
    values_ptr,
    exponents_ptr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    head, dim = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    at = head[:, None] * HEAD_DIM + dim[None, :]
    mask = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + token * x_row + at, mask=mask, other=0.0)
    values, exponent, rounded = round_heads(x)
    tl.store(x_ptr + token * x_row + at, rounded.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + slot * (NUM_HEADS * HEAD_DIM) + at, values, mask=mask & (slot >= 0))
    place_exponents(exponents_ptr, exponent, slot, head, NUM_HEADS, BLOCK_SIZE)


def packed_words(values: torch.Tensor) -> torch.Tensor:
    """Return e4m3 values [..., d] as int32 [..., d / 4] for `e4m3_values`, as they are where that is impossible."""
    # The interpreter knows no assembly.
    return values if values.shape[-1] % 4 or knobs.runtime.interpret else values.view(torch.int32)


def store_fp8(
    x_Thd: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, exponents: torch.Tensor
) -> None:
    """Round each token's K (or V) to e4m3 in place, and write it to its slot.

    x           rows of contiguous heads, any stride between rows
    slots       int64 [up to T]: block * block_size + offset, -1 for none; rows beyond `slots` are not written
    values      float8_e4m3fn [num_blocks, block_size, h, d]
    exponents   uint8 [num_blocks, h, block_size]
    """
    num_rows, num_heads, head_dim = x_Thd.shape
    assert x_Thd.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    if num_rows:
        heads, block = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
        _store_fp8[(num_rows,)](
            *(x_Thd, x_Thd.stride(0), slots, len(slots), values, exponents),
            BLOCK_SIZE=values.shape[1],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEADS=heads,
            BLOCK=block,
            num_warps=4,
        )
