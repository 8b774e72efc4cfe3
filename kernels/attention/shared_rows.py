"""Decodes that share leading blocks, by torch's operators: the shared keys once for all queries, own keys row by row.

The reference of the kernels for GPUs.

B decodes, S of them with shared keys, H query heads, h KV heads, G = H / h, d head dim, v values of a head of the
output, L keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.attention.partial import merge_partial, partial_attention
from kernels.attention.shared_prefixes import SharedPrefixes

KEY_CHUNK = 512  # keys of one product: bounds the scores in memory

# Blocks -> k [L, h, d] and v [L, h, v] of all their tokens.
Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class SharedGroup:
    """Decodes of one group, int64 [S], and the blocks that they share, int64."""

    rows: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class OwnKeys:
    """Decodes of similar length behind their shared keys.

    rows     int64 [B]
    blocks   int64 [B, blocks of the longest]
    lens     int64 [B], keys of each decode
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True)
class SharedRows:
    """All decodes of a forward that share keys."""

    groups: Sequence[SharedGroup]
    own: Sequence[OwnKeys]


def shared_groups(
    shared: SharedPrefixes, block_table: torch.Tensor, block_size: int
) -> list[SharedGroup]:
    """Return the groups with their blocks on the table's device."""
    rows = torch.from_numpy(shared.rows).to(block_table.device, torch.int64)
    found = []
    for members, tokens in zip(
        rows.split_with_sizes(shared.sizes.tolist()), shared.tokens, strict=True
    ):
        found.append(SharedGroup(members, block_table[members[0], : int(tokens) // block_size]))
    return found


def decode_shared(
    plan: SharedRows, q_BHd: torch.Tensor, read: Read, scale: float, out_BHv: torch.Tensor
) -> None:
    """Write the attention of the plan's decodes to their rows of out_BHv."""
    o_BHv = torch.zeros(out_BHv.shape, dtype=torch.float32, device=out_BHv.device)
    lse_BH = o_BHv.new_zeros(o_BHv.shape[:2])
    for own in plan.own:
        found = _own_attention(q_BHd.index_select(0, own.rows), read, scale, own)
        o_BHv.index_copy_(0, own.rows, found[0])
        lse_BH.index_copy_(0, own.rows, found[1])
    merge_groups(plan.groups, q_BHd, read, scale, o_BHv, lse_BH)
    for group in plan.groups:
        out_BHv.index_copy_(0, group.rows, o_BHv[group.rows].to(out_BHv.dtype))


def merge_groups(
    groups: Sequence[SharedGroup],
    q_BHd: torch.Tensor,
    read: Read,
    scale: float,
    o_BHv: torch.Tensor,
    lse_BH: torch.Tensor,
) -> None:
    """Merge the attention to shared keys into that to own keys; o and lse, in base e, are float32."""
    for group in groups:
        k_Lhd, v_Lhv = (part.float() for part in read(group.blocks))
        q_SHd, num_heads = q_BHd.index_select(0, group.rows).float(), k_Lhd.shape[1]
        # The query heads of all decodes that share a KV head are the rows of one product.
        stacked = q_SHd.view(len(q_SHd), num_heads, -1, q_SHd.shape[-1]).transpose(0, 1)
        q_hMd = stacked.reshape(num_heads, -1, q_SHd.shape[-1])
        o_hMv = q_hMd.new_zeros(*q_hMd.shape[:2], v_Lhv.shape[-1])
        lse_hM = q_hMd.new_full(q_hMd.shape[:2], float("-inf"))
        for first in range(0, len(k_Lhd), KEY_CHUNK):
            keys = slice(first, first + KEY_CHUNK)
            k_hKd, v_hKv = k_Lhd[keys].transpose(0, 1), v_Lhv[keys].transpose(0, 1)
            found = partial_attention(q_hMd, k_hKd, v_hKv, scale, k_hKd.shape[1])
            merge_partial(o_hMv, lse_hM, *found)
        shape = num_heads, len(q_SHd), -1
        o_SHv = o_hMv.view(*shape, o_hMv.shape[-1]).transpose(0, 1).flatten(1, 2)
        lse_SH = lse_hM.view(shape).transpose(0, 1).flatten(1, 2)
        own_SHv, own_SH = o_BHv[group.rows], lse_BH[group.rows]
        merge_partial(own_SHv, own_SH, o_SHv, lse_SH)
        o_BHv.index_copy_(0, group.rows, own_SHv)


def _own_attention(
    q_BHd: torch.Tensor, read: Read, scale: float, own: OwnKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, H, v] and the log-sum-exps [B, H] of own keys, float32."""
    count = len(q_BHd)
    k_Lhd, v_Lhv = (part.float() for part in read(own.blocks.flatten()))
    k_BLhd, v_BLhv = (part.view(count, -1, *part.shape[1:]) for part in (k_Lhd, v_Lhv))
    hidden_BL = torch.arange(k_BLhd.shape[1], device=q_BHd.device) >= own.lens[:, None]
    # What a request left behind the last token may be NaN.
    v_BLhv = v_BLhv.masked_fill(hidden_BL[..., None, None], 0)
    q_BhGd = q_BHd.float().view(count, k_BLhd.shape[2], -1, q_BHd.shape[-1])
    scores_BhGL = torch.einsum("bhgd,blhd->bhgl", q_BhGd, k_BLhd) * scale
    scores_BhGL = scores_BhGL.masked_fill(hidden_BL[:, None, None], float("-inf"))
    lse_BhG = torch.logsumexp(scores_BhGL, -1)
    weights_BhGL = (scores_BhGL - lse_BhG.unsqueeze(-1)).exp()
    o_BhGv = torch.einsum("bhgl,blhv->bhgv", weights_BhGL, v_BLhv)
    return o_BhGv.flatten(1, 2), lse_BhG.flatten(1, 2)
