"""The attention half of a decoder layer with latent attention (MLA). Knows no model and no checkpoint.

T tokens, D hidden, H heads, n and r unrotated and rotated values of a head of q and k, d = n + r, v values of a head
of V, u = n + v, q values of q's latent (of q itself where it has none), C values of the latent of K and V, W = C + r.
"""

from copy import copy
from typing import Self

import torch

from kernels.attention.latent_up import LatentUp
from kernels.backends.select import Backends
from kernels.lora.rows import AdapterRows
from workers.layers.builder import LayerBuilder
from workers.layers.rope import apply_rope
from workers.specs.model import MlaSpec


class MlaBlock:
    """residual + o_proj(attention(q, K and V of the latent)), with q and the latent of norm(residual).

    A block takes and returns a sum in two parts, as `AttentionBlock` does.
    """

    def __init__(self, builder: LayerBuilder, spec: MlaSpec, layer: int):
        self.spec = spec
        self.layer = layer
        self.attention = builder.backends.attention
        dim, dims = builder.hidden_size, spec.dims
        self.input_norm = builder.norm(dim)
        self.q_width = spec.q_rank or spec.q_size
        # one product for what comes from the hidden state: q or its latent, the latent of K and V, the rotated key
        self.down = builder.linear("attention.down", self.q_width + dims.width, dim)
        # q itself has no bias, its latent has
        biased = (spec.q_rank or 0) + dims.width
        self.down_bias = builder.empty(biased) if spec.bias else None
        eps = spec.latent_eps
        self.q_norm = None if spec.q_rank is None else builder.norm(spec.q_rank, eps=eps)
        self.q_up = None
        if spec.q_rank is not None:
            self.q_up = builder.linear("attention.q_up", spec.q_size, spec.q_rank)
        self.kv_norm = builder.norm(dims.rank, eps=eps)
        self.kv_up = LatentUp(builder.empty(spec.kv_up_size, dims.rank), spec.num_heads)
        self.o = builder.linear("attention.o", dim, spec.o_size, bias=spec.bias)

    def with_backends(self, backends: Backends) -> Self:
        """Return a view of the same weights that calls other attention."""
        view = copy(self)
        view.attention = backends.attention
        return view

    def forward(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        rotation_T1r: torch.Tensor,
        adapters: AdapterRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual_TD is overwritten."""
        residual_TD, h_TD = self.input_norm.add_for(self.down, residual_TD, hidden_TD, adapters)
        down_T = self.down(h_TD, adapters=adapters)
        if self.down_bias is not None:
            down_T[:, -len(self.down_bias) :] += self.down_bias
        q_THd = self._queries(down_T[:, : self.q_width], adapters)
        latent_TW = down_T[:, self.q_width :]
        if self.attention.fused_store:
            norm = self.kv_norm
            self.attention.store_latents(
                q_THd, latent_TW, self.layer, rotation_T1r, norm.weight, norm.eps
            )
        else:
            rotate(q_THd[..., self.spec.dims.nope_dim :], rotation_T1r)
            latent_TW = self._latents(latent_TW, rotation_T1r)
        heads = self.kv_up.heads(adapters)
        o_TV = self.attention.attend_latent(q_THd, latent_TW, heads, self.layer).flatten(1)
        if self.input_norm.triton is not None:
            return residual_TD, self.o(o_TV, partial=True, adapters=adapters)
        return self.o(o_TV, residual_TD, adapters=adapters), None

    def _queries(self, q_Tq: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """Return q [T, H, d], not rotated yet."""
        if self.q_norm is not None and self.q_up is not None:
            q_Tq = self.q_up(self.q_norm(q_Tq), adapters=adapters)
        return q_Tq.view(len(q_Tq), self.spec.num_heads, self.spec.head_dim)

    def _latents(self, latent_TW: torch.Tensor, rotation_T1r: torch.Tensor) -> torch.Tensor:
        """Return what the cache keeps of a token: the normed latent, then the rotated key."""
        rank = self.spec.dims.rank
        rotate(latent_TW[:, None, rank:], rotation_T1r)
        return torch.cat((self.kv_norm(latent_TW[:, :rank]), latent_TW[:, rank:]), -1)


def rotate(x_TNr: torch.Tensor, rotation_T1r: torch.Tensor) -> None:
    """Rotate whole heads in place, which may be parts of wider rows."""
    x_TNr.copy_(apply_rope(x_TNr.float(), rotation_T1r))
