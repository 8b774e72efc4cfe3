"""Sequences of the attention tests that begin with the same blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.attention.base import Attention, AttentionBatch
from kernels.attention.shared_prefixes import SharingCost
from kernels.interface.shared_reads import SharedReads
from tests.unit.test_kernels_attention import Pages

ANY = SharingCost(group_tokens=1, saved_tokens=1)
Groups = Sequence[tuple[Sequence[int], int]]  # sequences, and how many leading blocks they share


def share(pages: Pages, groups: Groups) -> None:
    """Let sequences begin with the blocks of the first of their group, in layers over all tokens.

    The blocks that they had there become NaN. Call it before the pages move.
    """
    for (first, *others), count in groups:
        num_tokens = count * pages.block_size
        for seq in others:
            assert num_tokens < pages.seqs[seq][0] + 1, "a shared token is computed"
            for layer in pages.layers:
                if layer.spec.window is None:
                    for block in pages.block_table[seq, :count].tolist():
                        layer._spoil(block)
                    for rows in (layer.keys, layer.values):
                        rows[seq][:num_tokens] = rows[first][:num_tokens]
            pages.block_table[seq, :count] = pages.block_table[first, :count]
            pages.slots_of[seq][:num_tokens] = pages.slots_of[first][:num_tokens]


def share_latents(pages: Pages, layers: Sequence[Any], groups: Groups) -> None:
    """As `share`, for layers of latents."""
    share(pages, groups)
    for layer in layers:
        for (first, *others), count in groups:
            for seq in others:
                num_tokens = count * pages.block_size
                layer.latents[seq][:num_tokens] = layer.latents[first][:num_tokens]


def with_groups(batch: AttentionBatch, groups: Groups) -> AttentionBatch:
    """Return the batch with what the KV cache says of these groups."""
    numbers, blocks = np.full(batch.num_seqs, -1, np.int32), np.zeros(batch.num_seqs, np.int32)
    for seqs, count in groups:
        numbers[list(seqs)], blocks[list(seqs)] = min(seqs), count
    return replace(batch, prefix_groups_cpu=numbers, prefix_blocks_cpu=blocks)


def use_cascade(attention: Attention) -> None:
    """Let it share where it can, whether that pays or not."""
    attention.shared_reads = SharedReads()
    attention.sharing_cost = ANY


def reads(attention: Attention) -> tuple[int, int]:
    """Rows and tokens that it has counted."""
    assert attention.shared_reads is not None
    return attention.shared_reads.rows, attention.shared_reads.tokens
