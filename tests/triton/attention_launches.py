"""Launches of the Triton kernels of attention and of its caches. B sequences."""

import torch

from kernels.attention.fp8_pages import Fp8Pages
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.kv_layout import layout_of
from tests.triton.launch_inputs import BLOCK, HEAD_DIM, HEADS, Inputs


def list_pages(at: Inputs, *, padded: bool) -> None:
    from kernels.triton.paged import list_pages

    num_rows = at.size + 2
    starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=at.device)
    pages = torch.zeros(64, dtype=torch.int32, device=at.device)
    slots = (at.slice(), torch.zeros(num_rows, dtype=torch.int64, device=at.device))
    list_pages(at.slice(at.size), starts, pages, *(slots if padded else ()))


def store_kv(at: Inputs) -> None:
    from kernels.triton.paged import store_kv

    qkv = at.rows(3 * HEADS, HEAD_DIM)
    store_kv(qkv[:, HEADS : 2 * HEADS], qkv[:, 2 * HEADS :], at.slice(), *at.caches())


def store_fp8(at: Inputs) -> None:
    from kernels.triton.fp8_heads import store_fp8

    qkv, (k, _, exponents, _) = at.rows(3 * HEADS, HEAD_DIM), at.fp8_caches()
    store_fp8(qkv[:, HEADS : 2 * HEADS], at.slice(), k, exponents)


def expand_fp8(at: Inputs) -> None:
    from kernels.triton.expand_fp8 import expand_fp8

    whole = torch.zeros(at.offset + 3 * at.size, dtype=torch.int32, device=at.device)
    rows = [at.rows(HEADS, HEAD_DIM) for _ in "kv"]
    expand_fp8(at.fp8_caches(), *whole[at.offset :].split(at.size), *rows)


def norm_rotate_store(at: Inputs, *, norm: bool, rotary_dim: int, fp8: bool = False) -> None:
    from kernels.triton.qk_rope import norm_rotate_store

    weight = None
    if norm:
        weight = torch.ones(2 * HEADS, HEAD_DIM, dtype=torch.bfloat16, device=at.device)
    rotation = at.rows(1, rotary_dim // 2, dtype=torch.complex64)
    qkv = at.rows(3 * HEADS, HEAD_DIM)
    caches = at.fp8_caches() if fp8 else at.caches()
    norm_rotate_store(qkv, weight, 1e-6, rotation, at.slice(), *caches)


def decodes(at: Inputs, *, cut: bool, sinks: bool = True, fp8: bool = False) -> None:
    """Decodes of 8 query heads for each KV head."""
    from kernels.triton.decode_merge import Chunks
    from kernels.triton.paged_decode import paged_decode

    q = at.rows(8 * HEADS, HEAD_DIM)
    parts = (at.size, at.size, at.size, at.size + 1)
    whole = torch.zeros(at.offset + sum(parts), dtype=torch.int32, device=at.device)
    chunks = Chunks(*whole[at.offset :].split(parts), at.slice(at.size), cut)
    of_heads = torch.zeros(at.offset + 8 * HEADS, device=at.device)[at.offset :]
    options = {"scale": 0.1, "sinks_H": of_heads if sinks else None}
    caches = at.fp8_caches() if fp8 else at.caches()
    paged_decode(q, caches, torch.empty_like(q), chunks, **options)


def shared_decodes(at: Inputs, *, tile_rows: int, head_dim: int = 128, fp8: bool = False) -> None:
    """Decodes with shared keys, of 8 query heads for each KV head."""
    from kernels.triton.decode_merge import Chunks, SharedTiles, merge_chunks
    from kernels.triton.shared_decode import shared_decode

    q = at.rows(8 * HEADS, head_dim)
    parts = (*[at.size] * 3, at.size + 1, *[at.size] * 7)
    whole = torch.zeros(at.offset + sum(parts), dtype=torch.int32, device=at.device)
    lists = whole[at.offset :].split(parts)
    tiles = SharedTiles(*lists[4:], tile_rows)
    chunks = Chunks(*lists[:4], at.slice(at.size), True, tiles)
    caches = at.fp8_caches(head_dim) if fp8 else at.caches(head_dim)
    found = shared_decode(q, caches, tiles, chunks.block_table, scale=0.1)
    own = q.float(), q.new_zeros(q.shape[:2], dtype=torch.float32)
    merge_chunks(*own, chunks, torch.empty_like(q), found)


def latents(at: Inputs, *, fp8: bool) -> None:
    """Of a projection that holds q too, as it is without a latent of q, stored; and keys of several chunks, merged."""
    from kernels.triton.expand_keys import expand_keys
    from kernels.triton.merge_attention import merge_attention
    from kernels.triton.read_latents import read_latents
    from kernels.triton.store_latents import store_latents

    rank, rope, nope = 512, 64, 128
    down, weight = at.rows(HEADS * (nope + rope) + rank + rope), at.rows(rank).new_ones(rank)
    q, latent = down.split([HEADS * (nope + rope), rank + rope], 1)
    rotation = at.rows(1, rope // 2, dtype=torch.complex64)
    heads = q.view(at.size, HEADS, nope + rope)
    caches = at.latents(fp8=fp8)
    store_latents(heads, latent, weight, 1e-6, rotation, at.slice(), *caches)
    if fp8:
        read_latents(caches, at.slice())
    expand_keys(at.rows(HEADS, 2 * nope), latent[:, rank:], nope)
    rows, lse = at.rows(HEADS, nope), at.rows(HEADS, dtype=torch.float32)
    merge_attention(rows, lse, rows.clone(), lse.clone())


def latent_decodes(at: Inputs, *, cut: bool, num_heads: int = HEADS) -> None:
    """Decodes over latents in e4m3; queries have the strides of a product of each head."""
    from kernels.triton.decode_merge import Chunks
    from kernels.triton.latent_decode import latent_decode

    caches = at.latents(fp8=True)
    q, rope = at.rows(num_heads, 512), at.rows(num_heads, 192)[..., 128:]
    of_heads = q.view(num_heads, at.size, 512).transpose(0, 1)
    parts = (at.size, at.size, at.size, at.size + 1)
    whole = torch.zeros(at.offset + sum(parts), dtype=torch.int32, device=at.device)
    chunks = Chunks(*whole[at.offset :].split(parts), at.slice(at.size), cut)
    latent_decode(of_heads, rope, caches, torch.empty_like(q), chunks, scale=0.1)


def warp_decodes(at: Inputs, *, cut: bool) -> None:
    """Decodes of 8 query heads of 128 values for each KV head, by single warps."""
    from kernels.triton.decode_merge import Chunks
    from kernels.triton.paged_decode import E4M3_WARPS, paged_decode

    spec = AttentionSpec(8 * HEADS, HEADS, 128, 1.0, fp8_cache=True)
    cache = torch.zeros(layout_of(spec).shape(4, BLOCK), dtype=torch.uint8, device=at.device)
    q, parts = at.rows(8 * HEADS, 128), (at.size, at.size, at.size, at.size + 1)
    whole = torch.zeros(at.offset + sum(parts), dtype=torch.int32, device=at.device)
    chunks = Chunks(*whole[at.offset :].split(parts), at.slice(at.size), cut)
    options = {"scale": 0.1, "sinks_H": None, "form": E4M3_WARPS}
    caches = Fp8Pages(cache, spec, BLOCK).tensors
    paged_decode(q, caches, torch.empty_like(q), chunks, **options)


def prompts(at: Inputs, *, window: int | None, fp8: bool = False) -> None:
    from kernels.triton.paged_attention import paged_attention

    q = at.rows(8 * HEADS, HEAD_DIM)
    k, v, *exponents = at.fp8_caches() if fp8 else at.caches()
    parts = (at.size, at.size, at.size + 1, at.size)
    whole = torch.zeros(at.offset + sum(parts), dtype=torch.int32, device=at.device)
    seqs, firsts, starts, lens = whole[at.offset :].split(parts)
    paged_attention(
        *(q, k, v, torch.empty_like(q), at.slice(at.size), (seqs, firsts), starts, lens),
        scale=0.1,
        window=window,
        sinks_H=None,
        exponents=exponents,
    )


def copy_pieces_there_and_back(at: Inputs) -> None:
    """There and back, of words of 8 bytes, as released models have them."""
    from workers.kv_transfer.contents import copy_on_device

    pieces = [at.rows(2048).new_zeros(4, 4096, dtype=torch.uint8) for _ in range(3)]
    copy, places = copy_on_device(pieces), torch.zeros(at.size, dtype=torch.int64)
    rows = at.rows(1)[:0].new_zeros(at.size, 3 * 4096 + 64 * at.offset, dtype=torch.uint8)
    for to_rows in (True, False):
        copy(places.to(at.device), rows, to_rows=to_rows)
