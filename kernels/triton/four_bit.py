"""Codes of four bits to values, in registers: for bfloat16 as bit patterns in assembly, for other dtypes in float32.

A tile has W rows (whole tiles of 64) and 64 columns; its bytes hold columns j and j + 32, see kernels.four_bit. A
thread reads the bytes of the values that it gives to the tensor cores, so that no value changes threads.
"""

import triton
import triton.language as tl

# Four bytes b0 .. b3 to four pairs of bfloat16, of their low bits and of their high bits. 0x4300 is 128, and its
# last bit counts 1, so that 128 + code is a bit pattern; minus 128 + zero point, times the scale. Both values of a pair
# lie in one row, which has one scale and zero point.
INT4_ASM = tl.constexpr(
    """
    {
        .reg .b32 x, y, p, q;
        prmt.b32 x, $4, 0, 0x4140;
        prmt.b32 y, $4, 0, 0x4342;
        lop3.b32 p, x, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 q, y, 0x000f000f, 0x43004300, 0xea;
        shr.u32 x, x, 4;
        shr.u32 y, y, 4;
        lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 y, y, 0x000f000f, 0x43004300, 0xea;
        sub.rn.bf16x2 p, p, $5;
        sub.rn.bf16x2 q, q, $6;
        sub.rn.bf16x2 x, x, $7;
        sub.rn.bf16x2 y, y, $8;
        mul.rn.bf16x2 $0, p, $9;
        mul.rn.bf16x2 $1, q, $10;
        mul.rn.bf16x2 $2, x, $11;
        mul.rn.bf16x2 $3, y, $12;
    }
    """
)
# Without zero points one instruction subtracts 8 and multiplies. Codes in the low bits of bfloat16 are code / 2 ** 133,
# and four bits higher code / 2 ** 129: patterns up to 255 are evenly spaced, subnormal or not. Factors are
# those of SCALE_ASM, so that the result is (code - 8) * scale / 2 ** 24, rounded once. Of four bytes two may lie in
# another row, which has the third factor of each four.
MIDDLE_ASM = tl.constexpr(
    """
    {
        .reg .b32 x, y, p, q;
        prmt.b32 x, $4, 0, 0x4140;
        prmt.b32 y, $4, 0, 0x4342;
        and.b32 p, x, 0x000f000f;
        and.b32 q, y, 0x000f000f;
        and.b32 x, x, 0x00f000f0;
        and.b32 y, y, 0x00f000f0;
        fma.rn.bf16x2 $0, p, $5, $13;
        fma.rn.bf16x2 $1, q, $7, $15;
        fma.rn.bf16x2 $2, x, $9, $17;
        fma.rn.bf16x2 $3, y, $11, $19;
    }
    """
)
# The low half of a word, float16, to pairs of bfloat16: times 2 ** 109, 2 ** 105 and -8 / 2 ** 24. A scale may be 0.
SCALE_ASM = tl.constexpr(
    """
    {
        .reg .b16 h, unused;
        .reg .f32 f;
        .reg .b32 p, by;
        mov.b32 {h, unused}, $3;
        cvt.f32.f16 f, h;
        cvt.rn.bf16x2.f32 p, f, f;
        mov.b32 by, 0x76007600;
        mul.rn.bf16x2 $0, p, by;
        mov.b32 by, 0x74007400;
        mul.rn.bf16x2 $1, p, by;
        mov.b32 by, 0xb500b500;
        mul.rn.bf16x2 $2, p, by;
    }
    """
)
# What `expand` divides values by, where `shrinks`.
SHRUNK = tl.constexpr(2.0**24)
# e2m1 in bits 15 and 8 .. 6 of bfloat16 is the value divided by 2 ** 126, subnormal values too; the scale is multiplied
# by that before. A product copies a code to both places at once: its two copies do not overlap.
MXFP4_ASM = tl.constexpr(
    """
    {
        .reg .b32 x, y, p, q;
        prmt.b32 x, $4, 0, 0x4140;
        prmt.b32 y, $4, 0, 0x4342;
        and.b32 p, x, 0x000f000f;
        and.b32 q, y, 0x000f000f;
        and.b32 x, x, 0x00f000f0;
        and.b32 y, y, 0x00f000f0;
        mul.lo.u32 p, p, 0x1040;
        mul.lo.u32 q, q, 0x1040;
        mul.lo.u32 x, x, 0x104;
        mul.lo.u32 y, y, 0x104;
        and.b32 p, p, 0x81c081c0;
        and.b32 q, q, 0x81c081c0;
        and.b32 x, x, 0x81c081c0;
        and.b32 y, y, 0x81c081c0;
        mul.rn.bf16x2 $0, p, $5;
        mul.rn.bf16x2 $1, q, $6;
        mul.rn.bf16x2 $2, x, $7;
        mul.rn.bf16x2 $3, y, $8;
    }
    """
)


@triton.jit
def load_codes(at_ptr, tile_stride, TILE_W: tl.constexpr):
    """Return uint8 [W, 32]: the bytes of one block of columns, of W / 64 tiles that are tile_stride bytes apart."""
    tiles = tl.arange(0, TILE_W // 64)[:, None]
    codes = tl.load(at_ptr + tiles * tile_stride + tl.arange(0, 2048)[None, :])
    parts = tl.reshape(codes, (TILE_W // 64, 4, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 6, 2, 4, 5, 3, 7)), (TILE_W, 32))


@triton.jit
def _load_part(words_ptr, at, TILE_W: tl.constexpr, PER_WORD: tl.constexpr):
    """Return int32 [W]: the parts of 32-bit words that are places at, at + 1 .. of values, PER_WORD of a word.

    Each row reads its whole word: copies to shared memory ahead of time have 4 bytes or more.
    """
    lanes = tl.arange(0, TILE_W)
    words = tl.load(words_ptr + at // PER_WORD + lanes // PER_WORD)
    return words >> (lanes % PER_WORD * (32 // PER_WORD))


@triton.jit
def load_scales(
    scales_ptr,
    zeros_ptr,
    row,
    num_rows,
    block,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Return scales and zero points [W] of rows from `row` on, of a block's columns in the low, then the high bits.

    scales, zeros   places of 32-bit words; a word of MXFP4 has a row's scales of two blocks
    """
    if KIND == "mxfp4":
        words = tl.load(scales_ptr + (block // 2) * num_rows + row + tl.arange(0, TILE_W))
        scales, zeros = words >> (block % 2 * 16), tl.full((TILE_W,), 0, tl.int32)
        return scales, zeros, scales >> 8, zeros
    at = (block * 64 // GROUP) * num_rows + row
    scales, zeros = _load_part(scales_ptr, at, TILE_W, 2), tl.full((TILE_W,), 8, tl.int32)
    if ZEROS:
        zeros = _load_part(zeros_ptr, at, TILE_W, 4) & 15
    high_scales, high_zeros = scales, zeros
    if GROUP == 32:
        high_scales = _load_part(scales_ptr, at + num_rows, TILE_W, 2)
        if ZEROS:
            high_zeros = _load_part(zeros_ptr, at + num_rows, TILE_W, 4) & 15
    return scales, zeros, high_scales, high_zeros


@triton.jit
def _scale_of(scales, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Return scales, low bits of words, as factors: in bfloat16 where PACKED, MXFP4 times 2 ** 126; else in float32."""
    if KIND == "int4":
        halves = scales.to(tl.int16).to(tl.float16, bitcast=True)
        factors = halves.to(tl.bfloat16 if PACKED else tl.float32)
    elif PACKED:
        factors = (((scales & 255) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        factors = tl.exp2((scales & 255).to(tl.float32) - 127)
    return factors


@triton.jit
def _values(codes, zeros, KIND: tl.constexpr):
    """Return what codes [W, 32] stand for without their scales, in float32."""
    if KIND == "int4":
        values = codes.to(tl.float32) - zeros.to(tl.float32)[:, None]
    else:
        exponent, fraction = (codes >> 1 & 3).to(tl.float32), (codes & 1).to(tl.float32)
        size = tl.where(exponent > 0, (2 + fraction) * tl.exp2(exponent - 2), fraction * 0.5)
        values = tl.where(codes > 7, -size, size)
    return values


@triton.jit
def _above_128(zeros):
    return (zeros.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.constexpr_function
def shrinks(kind: str, zeros: bool, packed: bool) -> bool:
    """Return whether `expand` returns values divided by SHRUNK."""
    return packed and kind == "int4" and not zeros


@triton.jit
def _expand_middle(codes, scales, high_scales):
    """Return values of the low and of the high bits, uint8 [W, 32], of int4 without zero points, over SHRUNK."""
    low, _, low_offset = _scale_pairs(scales, codes)
    _, high, high_offset = _scale_pairs(high_scales, codes)
    return tl.inline_asm_elementwise(
        MIDDLE_ASM,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [codes, low, high, low_offset, high_offset],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _scale_pairs(scales, codes):
    low, high, offset = tl.inline_asm_elementwise(
        SCALE_ASM,
        "=r,=r,=r,r",
        [scales],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    low = tl.broadcast_to(low[:, None], codes.shape)
    high = tl.broadcast_to(high[:, None], codes.shape)
    return low, high, tl.broadcast_to(offset[:, None], codes.shape)


@triton.jit
def expand(
    codes,
    scales,
    zeros,
    high_scales,
    high_zeros,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return [W, 64] in DTYPE, divided by SHRUNK where `shrinks`; see `load_scales`."""
    low_scale = _scale_of(scales, KIND, PACKED)[:, None]
    high_scale = _scale_of(high_scales, KIND, PACKED)[:, None]
    if shrinks(KIND, ZEROS, PACKED):
        first, second = _expand_middle(codes, scales, high_scales)
    elif PACKED:
        low_scale = tl.broadcast_to(low_scale, (codes.shape[0], 32))
        high_scale = tl.broadcast_to(high_scale, (codes.shape[0], 32))
        if KIND == "int4":
            low_zero = tl.broadcast_to(_above_128(zeros)[:, None], (codes.shape[0], 32))
            high_zero = tl.broadcast_to(_above_128(high_zeros)[:, None], (codes.shape[0], 32))
            first, second = tl.inline_asm_elementwise(
                INT4_ASM,
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [codes, low_zero, high_zero, low_scale, high_scale],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            first, second = tl.inline_asm_elementwise(
                MXFP4_ASM,
                "=r,=r,=r,=r,r,r,r,r,r",
                [codes, low_scale, high_scale],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
    else:
        first = (_values(codes & 15, zeros, KIND) * low_scale).to(DTYPE)
        second = (_values(codes >> 4, high_zeros, KIND) * high_scale).to(DTYPE)
    halves = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(halves, (codes.shape[0], 64))
