"""Attention of decodes to leading keys that they share: each tile of K and V serves all query heads of several decodes.

A program computes one tile, the G query heads that share a KV head of up to TILE / G decodes of one group, for some of
the keys that the group shares. Queries are the rows of its products, so a tile fills the tensor cores; the keys are all
before every query, so none is masked but those behind the last whole tile of keys. `decode_merge` merges the partial
results with those of each decode's own keys. Scales of keys and values in e4m3 as in `paged_decode`, but the values
take q's dtype: where q itself is converted it stays in registers, and other values spill.

R rows, a decode each; I tiles; P partial results; H query heads, h KV heads, G = H / h, d head dim.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.decode_merge import SharedTiles
from kernels.triton.fp8_heads import e4m3_values, packed_words, power_of_two
from kernels.triton.page_tiles import LOG2_E, blocks_of, load_tile

# Of an SM, for the programs that `shared_chunks.TILES` has run on it at a time.
SHARED_BYTES = 224 * 2**10
STAGES = 3  # most tiles of keys in flight


@triton.jit
def _merge(q, scale, loaded, seen, softmax, FP8: tl.constexpr, MASKED: tl.constexpr):
    """Return maximum, sum and output of the softmax so far merged with loaded keys; at least one key is seen."""
    k, v, k_exponent, v_exponent = loaded
    top, total, out = softmax
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    scores = tl.dot(q, e4m3_values(k, q.dtype).T, input_precision=precision) * scale
    if FP8:
        scores *= power_of_two(k_exponent)[None, :]
        scores += (v_exponent - 127).to(tl.float32)[None, :]
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    if FP8:
        total = total * decay + tl.sum(weights * power_of_two(254 - v_exponent)[None, :], 1)
    else:
        total = total * decay + tl.sum(weights, 1)
    weights = weights.to(q.dtype)
    out = tl.dot(weights, e4m3_values(v, q.dtype), out * decay[:, None], input_precision=precision)
    return new_top, total, out


@triton.jit
def _attend(
    q,
    scale,
    caches,
    table_ptr,
    begin,
    end,
    head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
):
    """Return maximum, sum and output of the softmax over keys `begin` to `end`, at least one; scale is in base 2."""
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    out = tl.zeros(q.shape, tl.float32)
    whole = begin + (end - begin) // KEYS * KEYS
    key = begin + tl.arange(0, KEYS)
    block = blocks_of(table_ptr, key, end, BLOCK_SIZE)
    for _ in tl.range(begin, whole, KEYS, num_stages=STAGES):
        seen = key < end
        found = load_tile(
            *(caches, block, key, seen, head),
            *(BLOCK_SIZE, HEADS, HEAD_DIM, HEAD_DIM_2, FP8),
        )
        key += KEYS
        block = blocks_of(table_ptr, key, end, BLOCK_SIZE)
        top, total, out = _merge(q, scale, found, seen, (top, total, out), FP8, False)
    if whole < end:
        seen = key < end
        found = load_tile(
            *(caches, block, key, seen, head),
            *(BLOCK_SIZE, HEADS, HEAD_DIM, HEAD_DIM_2, FP8),
        )
        top, total, out = _merge(q, scale, found, seen, (top, total, out), FP8, True)
    return top, total, out


@triton.jit(
    do_not_specialize=[
        *("q_row", "table_ptr", "table_row", "rows_ptr", "firsts_ptr", "counts_ptr"),
        *("begins_ptr", "ends_ptr"),
    ]
)
def shared_decode_kernel(
    q_ptr,
    q_row,
    k_ptr,
    v_ptr,
    k_exponents_ptr,
    v_exponents_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    table_row,
    rows_ptr,
    firsts_ptr,
    counts_ptr,
    begins_ptr,
    ends_ptr,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_2: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
):
    """One tile for one KV head; tiles without decodes end at once."""
    tile, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts_ptr + tile)
    if count == 0:
        return
    first = tl.load(firsts_ptr + tile)
    place, value = tl.arange(0, TILE), tl.arange(0, HEAD_DIM_2)
    member, query_head = place // GROUP, head * GROUP + place % GROUP
    used = member < count
    mask = used[:, None] & (value < HEAD_DIM)[None, :]
    row = tl.load(rows_ptr + first + member, mask=used, other=0).to(tl.int64)
    head_at = query_head[:, None] * HEAD_DIM + value[None, :]
    q = tl.load(q_ptr + row[:, None] * q_row + head_at, mask=mask, other=0)
    # The blocks of any decode of the group, because all have them.
    table_ptr += tl.load(rows_ptr + first).to(tl.int64) * table_row
    top, total, out = _attend(
        *(q, scale * LOG2_E, (k_ptr, v_ptr, k_exponents_ptr, v_exponents_ptr), table_ptr),
        *(tl.load(begins_ptr + tile), tl.load(ends_ptr + tile), head),
        *(BLOCK_SIZE, HEADS, HEAD_DIM, HEAD_DIM_2, KEYS, STAGES, FP8),
    )
    part = (tile * TILE_ROWS + member).to(tl.int64)
    all_heads: tl.constexpr = HEADS * GROUP
    lse = (top + tl.log2(total)) / LOG2_E
    tl.store(lse_ptr + part * all_heads + query_head, lse, mask=used)
    part_at = part[:, None] * (all_heads * HEAD_DIM) + head_at
    tl.store(partial_ptr + part_at, out / total[:, None], mask=mask)


def shared_decode(
    q_RHd: torch.Tensor,
    caches: Sequence[torch.Tensor],
    tiles: SharedTiles,
    block_table: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to shared keys, float32 [P, H, d], and its log-sum-exps in base e, float32 [P, H].

    q            rows of contiguous heads, any stride between rows
    caches       as of `paged_decode`
    block_table  int64 [>= R, max_blocks]
    """
    _, num_heads, head_dim = q_RHd.shape
    k_cache, v_cache, *exponents = caches
    if exponents:
        k_cache, v_cache = packed_words(k_cache), packed_words(v_cache)
    _, block_size, num_kv_heads, _ = caches[0].shape
    group, num_tiles = num_heads // num_kv_heads, len(tiles.counts)
    assert q_RHd.stride()[1:] == (head_dim, 1)
    tile = max(16, triton.next_power_of_2(tiles.tile_rows * group))
    width = max(16, triton.next_power_of_2(head_dim))
    keys = 64 if width <= 128 else 32  # more would spill registers
    stage_bytes = 2 * keys * width * caches[0].element_size()
    free_bytes = SHARED_BYTES // (1 if tile > 64 else 2) - tile * width * q_RHd.element_size()
    partial = q_RHd.new_empty(num_tiles * tiles.tile_rows, num_heads, head_dim, dtype=torch.float32)
    lse = partial.new_empty(partial.shape[:2])
    shared_decode_kernel[(num_tiles, num_kv_heads)](
        *(q_RHd, q_RHd.stride(0), k_cache, v_cache, *(exponents or (k_cache, v_cache))),
        *(partial, lse, block_table, block_table.stride(0)),
        *(tiles.rows, tiles.firsts, tiles.counts, tiles.begins, tiles.ends, scale),
        BLOCK_SIZE=block_size,
        HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_2=width,
        TILE=tile,
        TILE_ROWS=tiles.tile_rows,
        KEYS=keys,
        STAGES=max(1, min(STAGES, free_bytes // stage_bytes)),
        FP8=bool(exponents),
        num_warps=8 if tile > 64 else 4,
    )
    return partial, lse
