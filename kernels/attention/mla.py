"""Latent attention (MLA) by torch's operators: runs everywhere, and is the reference of other backends.

A decode attends to the cached latents themselves: the up-projection of K moves to q, that of V behind the softmax
(absorbed), so one latent serves all heads and nothing is expanded. A prompt has enough rows to share the work of
expanding latents into heads of K and V; it expands them chunk by chunk and merges the chunks' results by their
log-sum-exp, so a long context takes no more memory than a chunk. Knows nothing of scheduling.

T tokens, H heads, n and r unrotated and rotated values of a head of q and k, d = n + r, v values of a head of V,
u = n + v, C values of a latent, W = C + r, B sequences, L keys, M query rows.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from kernels.attention.base import Attention
from kernels.attention.latent_cache import Fp8LatentCache, LatentCache
from kernels.attention.latent_up import LatentHeads
from kernels.attention.partial import merge_partial, partial_attention
from kernels.attention.sdpa import DecodeGroup, Extend, SdpaAttention
from kernels.attention.shared_rows import decode_shared
from kernels.interface.attention_spec import MlaDims
from kernels.pending import wait_previous_ubatch

# Keys that are expanded at once, and query rows of one call: together they bound the scores in memory.
KEY_CHUNK = 512
QUERY_CHUNK = 256


class MlaAttention(SdpaAttention):
    """Decodes absorbed, in groups of similar length; prompts expanded, one by one."""

    name = "mla"
    auto = "latent attention (MLA) by torch's operators, runs everywhere"
    mla = True
    windows = sinks = False

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        Attention.bind(self, kv_caches)
        self._latents = [
            Fp8LatentCache(spec, kv_cache, self.block_size)
            if spec.fp8_cache
            else LatentCache(spec, kv_cache)
            for spec, kv_cache in zip(self.specs, kv_caches, strict=False)
        ]

    def attend_latent(
        self, q_THd: torch.Tensor, latent_TW: torch.Tensor, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        num_rows, num_tokens = len(q_THd), self._num_tokens
        cache = self._latents[layer]
        if num_rows > num_tokens:
            latent_TW = latent_TW[:num_tokens]
        latent_TW = cache.store(latent_TW, self._slot_mapping)
        wait_previous_ubatch()
        out_THv = q_THd.new_empty(num_rows, cache.num_heads, cache.dims.value_dim)
        if num_rows > num_tokens:
            out_THv[num_tokens:] = 0
        if self._num_decodes:
            decodes = slice(0, self._num_decodes)
            self._decode_latent(q_THd[decodes], heads, cache, out_THv[decodes])
        heads = heads.float() if self._extends else heads
        for extend in self._extends:
            rows = slice(extend.start, extend.end)
            out_THv[rows] = self._extend_latent(q_THd[rows], latent_TW[rows], heads, cache, extend)
        return out_THv

    def _reserve_causal(self, num_keys: int) -> None:
        """Do nothing: each chunk makes its own mask."""

    def _decode_latent(
        self,
        q_BHd: torch.Tensor,
        heads: LatentHeads,
        cache: LatentCache,
        out_BHv: torch.Tensor,
    ) -> None:
        """Write the attention of the planned decodes to out_BHv."""
        nope = cache.dims.nope_dim
        q_BHC = heads.absorb(q_BHd, nope).transpose(0, 1)
        q_BHW = torch.cat((q_BHC, q_BHd[..., nope:]), -1)
        o_BHC = q_BHW.new_empty(*q_BHW.shape[:2], cache.dims.rank)
        for group in self._decodes:
            if group.rows is None:
                o_BHC.copy_(_decode_group(q_BHW, cache, group))
            else:
                found_BHC = _decode_group(q_BHW.index_select(0, group.rows), cache, group)
                o_BHC.index_copy_(0, group.rows, found_BHC)
        if self._shared is not None:
            read = partial(cache.keys_and_values, dtype=q_BHW.dtype)
            decode_shared(self._shared, q_BHW, read, cache.scale, o_BHC)
        heads.values(o_BHC.transpose(0, 1), nope, out_BHv)

    def _extend_latent(
        self,
        q_MHd: torch.Tensor,
        latent_MW: torch.Tensor,
        heads: LatentHeads,
        cache: LatentCache,
        extend: Extend,
    ) -> torch.Tensor:
        """Return float32 o [M, H, v] of the new rows of one sequence. Their latents are in the cache already.

        heads   in float32
        """
        q_HMd = q_MHd.transpose(0, 1).float()
        num_rows = q_HMd.shape[1]
        o_HMv = q_HMd.new_zeros(cache.num_heads, num_rows, cache.dims.value_dim)
        lse_HM = q_HMd.new_full((cache.num_heads, num_rows), float("-inf"))
        num_keys = extend.context + num_rows
        slot_1 = heads.slots(slice(extend.start, extend.start + 1))
        for start, latents_LW in self._key_chunks(latent_MW, cache, extend, num_keys):
            slots_L = None if slot_1 is None else slot_1.expand(len(latents_LW))
            k_HLd, v_HLv = expand_latents(latents_LW.float(), heads, cache.dims, slots_L)
            for first in range(0, num_rows, QUERY_CHUNK):
                rows = slice(first, min(first + QUERY_CHUNK, num_rows))
                position = extend.context + first
                if start >= position + (rows.stop - first):
                    continue  # all keys lie behind the last row
                found = partial_attention(
                    q_HMd[:, rows], k_HLd, v_HLv, cache.scale, position - start
                )
                merge_partial(o_HMv[:, rows], lse_HM[:, rows], *found)
        return o_HMv.transpose(0, 1)

    def _key_chunks(
        self, latent_MW: torch.Tensor, cache: LatentCache, extend: Extend, num_keys: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the latents of a sequence in chunks, each with the position of its first."""
        if extend.blocks is None:
            for start in range(0, num_keys, KEY_CHUNK):
                yield start, latent_MW[start : start + KEY_CHUNK]
            return
        blocks = max(1, KEY_CHUNK // self.block_size)
        for first in range(0, len(extend.blocks), blocks):
            found_LW = cache.read(extend.blocks[first : first + blocks], latent_MW.dtype)
            start = first * self.block_size
            yield start, found_LW[: num_keys - start]


def _decode_group(q_BHW: torch.Tensor, cache: LatentCache, group: DecodeGroup) -> torch.Tensor:
    """Return the attention of absorbed queries over latents, [B, H, C]; the heads are rows of one KV head."""
    latents_LW = cache.read(group.blocks, q_BHW.dtype)
    group.clear_hidden(latents_LW)
    keys_B1LW = latents_LW.view(len(q_BHW), 1, -1, cache.dims.width)
    # The rotated key is a part of the values too: equal widths take a faster kernel, and it is cut off.
    mask_B11L = None if group.mask_B11L is None else group.mask_B11L.to(q_BHW.dtype)
    found_B1HW = F.scaled_dot_product_attention(
        q_BHW.unsqueeze(1), keys_B1LW, keys_B1LW, attn_mask=mask_B11L, scale=cache.scale
    )
    return found_B1HW[:, 0, :, : cache.dims.rank]


def expand_latents(
    latents_LW: torch.Tensor, heads: LatentHeads, dims: MlaDims, slots_L: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the heads of K [H, L, d] and V [H, L, v] of latents; slots_L as LatentHeads.expand."""
    kv_HLu = heads.expand(latents_LW[:, : dims.rank], slots_L).transpose(0, 1)
    rope_HLr = latents_LW[:, dims.rank :].expand(len(kv_HLu), -1, -1)
    return torch.cat((kv_HLu[..., : dims.nope_dim], rope_HLr), -1), kv_HLu[..., dims.nope_dim :]
