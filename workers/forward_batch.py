"""`ForwardBatch`: all tensors of one forward, filled from persistent buffers without loops over tokens.

T tokens (padding included), B sequences, L logits rows.
"""

from dataclasses import dataclass

import numpy as np
import torch

from workers.scheduler import ScheduledBatch
from workers.sequence import SequenceTable
from workers.step_sync import ForwardMode


@dataclass(frozen=True)
class ForwardBatch:
    """One forward. Tensors live on the device unless named `_cpu`; the next forward overwrites them.

    input_ids        int64 [T]            padding rows hold token 0
    positions        int64 [T]            padding rows hold 0
    slot_mapping     int64 [num_tokens]   where each new token's K and V go: block * block_size + offset
    block_table      int64 [B, max_blocks of this batch]
    seq_lens_cpu     int32 [B]            tokens of each sequence after this forward
    query_start_loc_cpu int32 [B+1]       where each sequence's new tokens start in input_ids
    logits_indices   int64 [L]            last token of each sequence that samples
    num_tokens_across_dp                  real tokens of every rank
    """

    forward_mode: ForwardMode
    num_tokens: int
    num_seqs: int
    num_decodes: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens_cpu: np.ndarray
    query_start_loc_cpu: np.ndarray
    logits_indices: torch.Tensor
    num_tokens_across_dp: tuple[int, ...]


class _Buffer:
    """A host array and its device twin; on CPU they are the same memory."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._device = self._host.to(device)
        self.numpy = self._host.numpy()

    def ship(self, *size: int) -> torch.Tensor:
        """The first `size` of each axis, on the device."""
        region = tuple(slice(n) for n in size)
        if self._host is self._device:
            return self._host[region]
        return self._device[region].copy_(self._host[region], non_blocking=True)


class ForwardBatchBuilder:
    """Owns the buffers of one rank. `max_num_tokens` bounds T, `max_num_seqs` bounds B."""

    def __init__(
        self, table: SequenceTable, max_num_tokens: int, max_num_seqs: int, device: torch.device
    ):
        self._table = table
        self._input_ids = _Buffer((max_num_tokens,), device)
        self._positions = _Buffer((max_num_tokens,), device)
        self._slot_mapping = _Buffer((max_num_tokens,), device)
        self._logits_indices = _Buffer((max_num_seqs,), device)
        self._block_table = _Buffer((max_num_seqs, table.block_table.shape[1]), device)

    def build(
        self, batch: ScheduledBatch, rows_to_run: int, num_tokens_across_dp: tuple[int, ...]
    ) -> ForwardBatch:
        """The tensors of `batch`, padded to `rows_to_run` rows."""
        table = self._table
        num_seqs = len(batch.seqs)
        num_tokens = batch.num_tokens
        assert num_tokens <= rows_to_run, f"{num_tokens} tokens do not fit in {rows_to_run} rows"
        rows = np.fromiter((seq.row for seq in batch.seqs), dtype=np.int64, count=num_seqs)
        num_new = batch.num_new_tokens
        starts = table.num_computed[rows]
        query_start_loc = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(num_new, out=query_start_loc[1:])

        row_of_token = rows
        positions = starts
        if batch.num_decodes < num_seqs:
            row_of_token = np.repeat(rows, num_new)
            positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], num_new)
        blocks, offsets = np.divmod(positions, table.block_size)
        self._input_ids.numpy[:num_tokens] = table.token_ids[row_of_token, positions]
        self._positions.numpy[:num_tokens] = positions
        self._slot_mapping.numpy[:num_tokens] = (
            table.block_table[row_of_token, blocks] * table.block_size + offsets
        )
        self._input_ids.numpy[num_tokens:rows_to_run] = 0
        self._positions.numpy[num_tokens:rows_to_run] = 0

        seq_lens = (starts + num_new).astype(np.int32)
        max_blocks = -(-int(seq_lens.max(initial=1)) // table.block_size)
        self._block_table.numpy[:num_seqs, :max_blocks] = table.block_table[rows, :max_blocks]
        logits = query_start_loc[1:][batch.samples] - 1
        self._logits_indices.numpy[: len(logits)] = logits
        return ForwardBatch(
            forward_mode=batch.forward_mode,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_decodes=batch.num_decodes,
            input_ids=self._input_ids.ship(rows_to_run),
            positions=self._positions.ship(rows_to_run),
            slot_mapping=self._slot_mapping.ship(num_tokens),
            block_table=self._block_table.ship(num_seqs, max_blocks),
            seq_lens_cpu=seq_lens,
            query_start_loc_cpu=query_start_loc,
            logits_indices=self._logits_indices.ship(len(logits)),
            num_tokens_across_dp=num_tokens_across_dp,
        )
