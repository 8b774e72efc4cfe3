"""Cuts a forward's batch at token borders into slices that can run beside each other. Pure bookkeeping, views only.

Attention is planned with `cut` of the rows that a step has; the model then runs on `cut_rows` of the same.

A sequence may straddle a border: its part in the next slice is the continuation of a chunked prefill, whose context
includes the part before. So in each layer the slices' attention must run in order.

T rows of a batch (padding included), n slices, B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kernels.attention.base import AttentionBatch
from workers.engine.step_sync import ubatch_borders
from workers.layers.moe import ModelBatch


@dataclass(frozen=True)
class RowSlice:
    """A ModelBatch of a slice's rows; input_ids and positions are the batch's own memory."""

    num_tokens: int | torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class BatchSlice:
    """Rows `start` to `end` of a batch, with all that attention reads of a ForwardBatch.

    num_tokens     real tokens, the rows beyond are padding; 0 where the slice is padding alone
    seq_lens_cpu   int32 [B of this slice]: tokens of each sequence after this slice
    """

    start: int
    end: int
    num_tokens: int
    num_seqs: int
    num_decodes: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens_cpu: np.ndarray
    query_start_loc_cpu: np.ndarray


def cut(batch: AttentionBatch, num_rows: int, num_ubatches: int) -> Sequence[BatchSlice]:
    """`num_ubatches` slices of as equal numbers of the `num_rows` rows as can be; there are at least that many rows."""
    assert num_rows >= num_ubatches, f"{num_rows} rows cannot be cut into {num_ubatches} slices"
    return [
        _slice(batch, start, end) for start, end in pairwise(ubatch_borders(num_rows, num_ubatches))
    ]


def cut_rows(batch: ModelBatch, num_ubatches: int) -> Sequence[RowSlice]:
    """The rows of the same slices."""
    borders = pairwise(ubatch_borders(len(batch.input_ids), num_ubatches))
    return [
        RowSlice(
            _tokens_between(batch.num_tokens, start, end),
            batch.input_ids[start:end],
            batch.positions[start:end],
        )
        for start, end in borders
    ]


def _tokens_between(num_tokens: int | torch.Tensor, start: int, end: int) -> int | torch.Tensor:
    if isinstance(num_tokens, torch.Tensor):
        return (num_tokens - start).clamp_(0, end - start)
    return max(0, min(num_tokens, end) - start)


def _slice(batch: AttentionBatch, start: int, end: int) -> BatchSlice:
    starts = batch.query_start_loc_cpu[: batch.num_seqs + 1]
    last = min(end, batch.num_tokens)  # behind the slice's last real token
    first_seq = end_seq = batch.num_seqs
    if start < last:
        first_seq = int(np.searchsorted(starts, start, side="right")) - 1
        end_seq = int(np.searchsorted(starts, last, side="left"))
    last = max(start, last)
    seq_lens = batch.seq_lens_cpu[first_seq:end_seq].copy()
    if end_seq > first_seq:
        seq_lens[-1] -= starts[end_seq] - last  # what the next slice computes of it
    return BatchSlice(
        start=start,
        end=end,
        num_tokens=last - start,
        num_seqs=end_seq - first_seq,
        # One-token parts of longer sequences stay among the others, so that they are computed as those are.
        num_decodes=max(0, min(batch.num_decodes, end_seq) - first_seq),
        slot_mapping=batch.slot_mapping[start:last],
        block_table=batch.block_table[first_seq:end_seq],
        seq_lens_cpu=seq_lens,
        query_start_loc_cpu=starts[first_seq : end_seq + 1].clip(start, last) - np.int32(start),
    )
