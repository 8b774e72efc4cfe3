"""`ForwardBatch`: all tensors of one forward, filled from persistent buffers without loops over tokens.

All integers of a forward lie in one array, so that they reach a GPU in one copy from pinned memory.

T tokens (padding included), B sequences, L logits rows.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.scheduler import ScheduledBatch
from workers.engine.sequence import SequenceTable
from workers.engine.step_sync import ForwardMode


@dataclass(frozen=True)
class ForwardBatch:
    """One forward. Tensors live on the device unless named `_cpu`; the next forward overwrites them.

    input_ids        int64 [T]            padding rows hold token 0; -1 - row is the token drawn last in that table row
    positions        int64 [T]            padding rows hold 0
    slot_mapping     int64 [num_tokens]   where each new token's K and V go: block * block_size + offset
    block_table      int64 [B, max_blocks of this batch]
    seq_lens_cpu     int32 [B]            tokens of each sequence after this forward
    query_start_loc_cpu int32 [B+1]       where each sequence's new tokens start in input_ids
    logits_indices   int64 [L]            last token of each sequence that samples
    sampling_rows    int64 [L]            row of each of them in the SequenceTable, here and on the host
    sampling_positions_cpu int64 [L]      where the new token of each will stand
    num_tokens_gpu   int64 [1]            num_tokens, for graphs
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
    sampling_rows: torch.Tensor
    sampling_rows_cpu: np.ndarray
    sampling_positions_cpu: np.ndarray
    num_tokens_gpu: torch.Tensor
    num_tokens_across_dp: tuple[int, ...]


_ALIGNMENT = 16  # integers; kernels are compiled anew for fields that are not aligned


def resolve_pending(input_ids: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """input_ids with the tokens that only the device knows: last_tokens int64 [table rows]."""
    row_T = (-1 - input_ids).clamp_(min=0)
    return torch.where(input_ids < 0, last_tokens.index_select(0, row_T), input_ids)


class _Staging:
    """A host array that is cut into the fields of one forward, and its twin on the device; on CPU the same memory.

    On GPUs there are two host arrays in turn: the copy of the forward before may still be under way. Fields of the same
    sizes, taken in the same order, always lie at the same addresses on the device.
    """

    def __init__(self, size: int, device: torch.device):
        cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.int64, pin_memory=cuda) for _ in range(1 + cuda)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = torch.zeros(size, dtype=torch.int64, device=device) if cuda else None
        self._turn = 0
        self._fields: list[tuple[int, tuple[int, ...]]] = []
        self._used = 0

    def take(self, *shape: int) -> np.ndarray:
        """The next field, to be filled."""
        start, size = self._used, math.prod(shape)
        self._fields.append((start, shape))
        self._used = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        return self._arrays[self._turn][start : start + size].reshape(shape)

    def ship(self) -> list[torch.Tensor]:
        """All fields taken, on the device."""
        there = host = self._hosts[self._turn]
        if self._device is not None:
            there = self._device
            there[: self._used].copy_(host[: self._used], non_blocking=True)
        tensors = [
            there[start : start + math.prod(shape)].view(shape) for start, shape in self._fields
        ]
        self._turn = (self._turn + 1) % len(self._hosts)
        self._fields, self._used = [], 0
        return tensors


class ForwardBatchBuilder:
    """Owns the buffers of one rank. `max_num_tokens` bounds T, `max_num_seqs` bounds B."""

    def __init__(
        self, table: SequenceTable, max_num_tokens: int, max_num_seqs: int, device: torch.device
    ):
        self._table = table
        per_seq = 2 + table.block_table.shape[1]
        size = 3 * max_num_tokens + per_seq * max_num_seqs + 1 + 7 * _ALIGNMENT
        self._staging = _Staging(size, device)

    def build(
        self,
        batch: ScheduledBatch,
        rows_to_run: int,
        num_tokens_across_dp: tuple[int, ...],
        *,
        last_tokens: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """The tensors of `batch`, padded to `rows_to_run` rows.

        last_tokens   int64 [table rows], the tokens drawn last; None: no token is pending, or a graph looks them up
        """
        table = self._table
        num_seqs, num_tokens = len(batch.seqs), batch.num_tokens
        assert num_tokens <= rows_to_run, f"{num_tokens} tokens do not fit in {rows_to_run} rows"
        rows, num_new = table.rows_of(batch.seqs), batch.num_new_tokens
        starts = table.num_computed[rows]
        query_start_loc = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(num_new, out=query_start_loc[1:])

        row_of_token, positions = _spread(batch, rows, starts, query_start_loc)
        blocks, offsets = np.divmod(positions, table.block_size)
        ends = starts + num_new
        seq_lens = ends.astype(np.int32)
        max_blocks = -(-int(seq_lens.max(initial=1)) // table.block_size)

        take = self._staging.take
        take(1)[:] = num_tokens
        for values in (table.token_ids[row_of_token, positions], positions):
            column = take(rows_to_run)
            column[:num_tokens], column[num_tokens:] = values, 0
        take(num_tokens)[:] = table.block_table[row_of_token, blocks] * table.block_size + offsets
        sampling_rows = rows[batch.samples]
        take(len(sampling_rows))[:] = query_start_loc[1:][batch.samples] - 1
        take(len(sampling_rows))[:] = sampling_rows
        take(num_seqs, max_blocks)[:] = table.block_table[rows, :max_blocks]
        on_device = self._staging.ship()
        input_ids = on_device[1]
        if last_tokens is not None:
            input_ids = resolve_pending(input_ids, last_tokens)
        return ForwardBatch(
            forward_mode=batch.forward_mode,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_decodes=batch.num_decodes,
            num_tokens_gpu=on_device[0],
            input_ids=input_ids,
            positions=on_device[2],
            slot_mapping=on_device[3],
            logits_indices=on_device[4],
            sampling_rows=on_device[5],
            block_table=on_device[6],
            sampling_rows_cpu=sampling_rows,
            sampling_positions_cpu=ends[batch.samples],
            seq_lens_cpu=seq_lens,
            query_start_loc_cpu=query_start_loc,
            num_tokens_across_dp=num_tokens_across_dp,
        )


def _spread(
    batch: ScheduledBatch, rows: np.ndarray, starts: np.ndarray, query_start_loc: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Table row and position of each of the batch's tokens, from each sequence's row and number of computed tokens."""
    if batch.num_decodes == len(rows):
        return rows, starts
    num_new = batch.num_new_tokens
    before = np.repeat(starts - query_start_loc[:-1], num_new)
    return np.repeat(rows, num_new), np.arange(batch.num_tokens) + before
