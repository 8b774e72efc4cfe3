"""Attention of decodes over pages in e4m3 by single warps, in Gluon: K and V pass through no shared memory.

A program is one warp, so nothing waits at a barrier, and an SM holds 16 programs. Each thread loads 16 bytes of K
or V at a time, exactly those that it multiplies: the layouts below make its words the operands of `mma.m16n8k16`, with
the values of a head, and of the output, in an order of their own. Scales as in `paged_decode`.

R rows, a decode each; H query heads, h KV heads, G = H / h up to 16, d = 128 values of a head.
"""

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.triton.decode_merge import Chunks, merge_chunks

HEAD_DIM = 128
RUN = 16  # keys that lie one behind the other in memory: pages are multiples
MOST_HEADS = 16  # of a group
REGISTERS = 128  # of a thread: an SM then holds 16 programs

LOG2_E = gl.constexpr(1.4426950408889634)
# Words of K: a lane has two times four words of every eighth key. Words of V: four words of four keys of 16.
K_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0], [16, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [],
        [],
        [32, 32],
    )
)
V_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [],
        [],
        [32, 32],
    )
)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, ROWS.value))
OF_VALUES = gl.constexpr(gl.SliceLayout(0, ROWS.value))

# float16 of the four e4m3 values of a word; and of two words, in turns.
WIDEN = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
    }""")
WIDEN_PAIRS = gl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 low, high, r0, r1, r2, r3;
    prmt.b32 low, $8, $9, 0x5140;
    prmt.b32 high, $8, $9, 0x7362;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.rn.f16x2.e4m3x2 r0, a;
    cvt.rn.f16x2.e4m3x2 r1, b;
    cvt.rn.f16x2.e4m3x2 r2, c;
    cvt.rn.f16x2.e4m3x2 r3, d;
    mov.b32 {$0, $1}, r0;
    mov.b32 {$2, $3}, r1;
    mov.b32 {$4, $5}, r2;
    mov.b32 {$6, $7}, r3;
    }""")


@gluon.jit
def _power_of_two(exponent):
    """float32 of biased exponents in int32."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _right(q):
    """Return q [G, 128] as the right operand of products with K, in the order of K's words."""
    parts = gl.permute(gl.reshape(q, (q.shape[0], 2, 4, 4, 2, 2)), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.permute(gl.reshape(parts, (q.shape[0], 128)), (1, 0)), RIGHT)


@gluon.jit
def _keys(words):
    """Return K as the left operand [keys, d], float16."""
    a, b, c, d = gl.inline_asm_elementwise(
        WIDEN, "=h,=h,=h,=h,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 1
    )
    parts = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (32, 2, 4, 4, 2, 2))
    k = gl.reshape(gl.permute(parts, (0, 1, 3, 4, 2, 5)), (32, 128))
    return gl.convert_layout(k, LEFT, assert_trivial=True)


@gluon.jit
def _values(words):
    """Return V as the left operand [d, keys], float16; row 8 j + g has value 16 g + j of the head."""
    even, odd = gl.split(gl.permute(gl.reshape(words, (16, 2, 32)), (0, 2, 1)))
    e0, o0, e1, o1, e2, o2, e3, o3 = gl.inline_asm_elementwise(
        WIDEN_PAIRS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [even, odd],
        (
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
            gl.float16,
        ),
        True,
        1,
    )
    evens = gl.join(gl.join(e0, e2), gl.join(e1, e3))
    odds = gl.join(gl.join(o0, o2), gl.join(o1, o3))
    parts = gl.reshape(gl.join(evens, odds), (16, 8, 4, 4, 2))
    v = gl.reshape(gl.permute(parts, (0, 4, 2, 3, 1)), (32, 128))
    return gl.convert_layout(gl.permute(v, (1, 0)), LEFT, assert_trivial=True)


@gluon.jit
def _run(table_ptr, key, BLOCK_SIZE: gl.constexpr):
    """Return the page of 16 keys that lie one behind the other, and the place of the first one in the page."""
    return gl.load(table_ptr + key // BLOCK_SIZE), key % BLOCK_SIZE


@gluon.jit
def _load(
    caches, table_ptr, start, first, end, head, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr
):
    """Return the words of K and V of a tile's keys and their exponents; any of the chunk's for keys outside of it."""
    k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr = caches
    page, offset = _run(table_ptr, start, BLOCK_SIZE)
    later_page, later_offset = _run(
        table_ptr, gl.minimum(start + 16, end - 1) // 16 * 16, BLOCK_SIZE
    )
    ROW: gl.constexpr = HEADS * 32  # words between two tokens
    near = (page * BLOCK_SIZE + offset) * ROW + head * 32
    far = (later_page * BLOCK_SIZE + later_offset) * ROW + head * 32
    key_k = gl.arange(0, 32, gl.SliceLayout(1, K_WORDS))
    key_v = gl.arange(0, 32, gl.SliceLayout(1, V_WORDS))
    word_k = gl.arange(0, 32, gl.SliceLayout(0, K_WORDS))
    word_v = gl.arange(0, 32, gl.SliceLayout(0, V_WORDS))
    row_k = (gl.maximum(gl.minimum(start + key_k, end - 1), first) % 16) * ROW
    row_v = (gl.maximum(gl.minimum(start + key_v, end - 1), first) % 16) * ROW
    k_at = gl.where(key_k < 16, near, far) + row_k
    v_at = gl.where(key_v < 16, near, far) + row_v
    k = gl.load(k_ptr + k_at[:, None] + word_k[None, :])
    v = gl.load(v_ptr + v_at[:, None] + word_v[None, :])
    key = gl.arange(0, 32, gl.SliceLayout(1, MMA))
    near = (page * HEADS + head) * BLOCK_SIZE + offset
    far = (later_page * HEADS + head) * BLOCK_SIZE + later_offset
    exponent_at = gl.where(key < 16, near, far) + key % 16
    return k, v, gl.load(k_exponents_ptr + exponent_at), gl.load(v_exponents_ptr + exponent_at)


@gluon.jit
def _merge(q, factor, loaded, inside, top, total, out):
    """Return the softmax so far merged with loaded keys."""
    k, v, k_exponent, v_exponent = loaded
    k_exponent, v_exponent = k_exponent.to(gl.int32), v_exponent.to(gl.int32)
    none = gl.zeros((32, out.shape[1]), gl.float32, MMA)
    scores = mma_v2(_keys(k), q, none) * factor[None, :]
    scores = scores * _power_of_two(k_exponent)[:, None]
    scores = scores + (v_exponent - 127).to(gl.float32)[:, None]
    scores = gl.where(inside[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 0))
    floor = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights, decay = gl.exp2(scores - floor[None, :]), gl.exp2(top - floor)
    inverse = gl.where(inside, _power_of_two(254 - v_exponent), 0.0)
    total = total * decay + gl.sum(weights * inverse[:, None], 0)
    right = gl.convert_layout(weights.to(gl.float16), RIGHT)
    return new_top, total, mma_v2(_values(v), right, out * decay[None, :])


@gluon.jit
def _queries(q_ptr, head, GROUP: gl.constexpr, COLUMNS: gl.constexpr):
    """Return q of a KV head [d, G] in float16, and the power of two that its columns were divided by."""
    row, value = gl.arange(0, COLUMNS, OF_ROWS), gl.arange(0, 128, OF_VALUES)
    at = q_ptr + ((head * GROUP + row) * 128)[:, None] + value[None, :]
    wide = gl.load(at, mask=(row < GROUP)[:, None] & (value >= 0)[None, :], other=0).to(gl.float32)
    exponent = gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent, 1), 253)
    q = (wide * _power_of_two(254 - exponent)[:, None]).to(gl.float16)
    return _right(q), gl.convert_layout(_power_of_two(exponent), gl.SliceLayout(0, MMA))


@gluon.jit(do_not_specialize=["q_row", "table_ptr", "table_row", "seq_ptr", "first_ptr", "end_ptr"])
def warp_decode_fp8_kernel(
    q_ptr,
    q_row,
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    table_row,
    seq_ptr,
    first_ptr,
    end_ptr,
    scale,
    PARTIAL: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """One chunk for one KV head; arguments as of `paged_decode_kernel`, K and V as int32 words."""
    chunk, head = gl.program_id(0), gl.program_id(1)
    seq = gl.load(seq_ptr + chunk).to(gl.int64)
    if seq < 0:
        return
    first, end = gl.load(first_ptr + chunk), gl.load(end_ptr + chunk)
    lines: gl.constexpr = gl.SliceLayout(0, MMA)
    q, factor = _queries(q_ptr + seq * q_row, head, GROUP, COLUMNS)
    factor = factor * (scale * LOG2_E)
    top = gl.full((COLUMNS,), float("-inf"), gl.float32, lines)
    total = gl.zeros((COLUMNS,), gl.float32, lines)
    out = gl.zeros((128, COLUMNS), gl.float32, MMA)
    caches = (k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr)
    table_ptr += seq * table_row
    start = first // 32 * 32
    key = gl.arange(0, 32, gl.SliceLayout(1, MMA))
    for at in range(start, end, 32):
        inside = (at + key >= first) & (at + key < end)
        tile = _load(caches, table_ptr, at, first, end, head, BLOCK_SIZE, HEADS)
        top, total, out = _merge(q, factor, tile, inside, top, total, out)
    place = chunk.to(gl.int64) if PARTIAL else seq
    _store(out_ptr, lse_ptr, place * HEADS + head, top, total, out, GROUP, PARTIAL)


@gluon.jit
def _store(out_ptr, lse_ptr, group, top, total, out, GROUP: gl.constexpr, PARTIAL: gl.constexpr):
    """Store the outputs of a group's heads; with PARTIAL also the log-sum-exps of the chunk in base e."""
    COLUMNS: gl.constexpr = out.shape[1]
    total = gl.where(total == 0, 1.0, total)
    if PARTIAL:
        head = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
        lse = gl.where(top == float("-inf"), top, (top + gl.log2(total)) / LOG2_E)
        gl.store(lse_ptr + group * GROUP + head, lse, mask=head < GROUP)
    out = (out / total[None, :]).to(out_ptr.dtype.element_ty)
    parts = gl.permute(gl.reshape(out, (16, 8, COLUMNS)), (2, 1, 0))
    out = gl.convert_layout(gl.reshape(parts, (COLUMNS, 128)), ROWS)
    row, value = gl.arange(0, COLUMNS, OF_ROWS), gl.arange(0, 128, OF_VALUES)
    at = out_ptr + ((group * GROUP + row) * 128)[:, None] + value[None, :]
    gl.store(at, out, mask=(row < GROUP)[:, None] & (value >= 0)[None, :])


def takes(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Return whether the kernel computes decodes of these heads over pages of this size."""
    return head_dim == HEAD_DIM and num_heads // num_kv_heads <= MOST_HEADS and not block_size % RUN


def warp_decode_fp8(
    q_RHd: torch.Tensor,
    caches: Sequence[torch.Tensor],
    out_RHd: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
) -> None:
    """Write the attention of all rows to out_RHd, or to partial results that are merged; as `paged_decode`.

    caches   K, V [num_blocks, block_size, h, 128] in float8_e4m3fn, their exponents [num_blocks, h, block_size]
    """
    num_heads, head_dim = q_RHd.shape[1:]
    k_cache, v_cache, *exponents = caches
    _, block_size, num_kv_heads, _ = k_cache.shape
    group, num_chunks = num_heads // num_kv_heads, len(chunks.seqs)
    assert takes(num_heads, num_kv_heads, head_dim, block_size), (num_heads, head_dim, block_size)
    assert q_RHd.stride()[1:] == (head_dim, 1) and out_RHd.is_contiguous()
    partial, lse = out_RHd, out_RHd
    if chunks.cut:
        partial = q_RHd.new_empty(num_chunks, num_heads, head_dim, dtype=torch.float32)
        lse = partial.new_empty(num_chunks, num_heads)
    warp_decode_fp8_kernel[(num_chunks, num_kv_heads)](
        *(q_RHd, q_RHd.stride(0), k_cache.view(torch.int32), v_cache.view(torch.int32)),
        *(*exponents, partial, lse, chunks.block_table, chunks.block_table.stride(0)),
        *(chunks.seqs, chunks.firsts, chunks.ends, scale),
        PARTIAL=chunks.cut,
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        GROUP=group,
        COLUMNS=8 if group <= 8 else MOST_HEADS,
        num_warps=1,
        maxnreg=REGISTERS,
    )
    if chunks.cut:
        merge_chunks(partial, lse, chunks, out_RHd)
