"""The tensors of a forward that attention reads, and how they are cut into ubatches. No requests, no model.

T rows (padding included), B sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

import numpy as np
import torch

Axis = Literal["row", "token", "seq", "logits", "block", "position"]
_NOTHING = slice(0, 0)


class Shape:
    """The shape of a batch's field, part of its annotation; no axes: one integer.

    row      T, padding included
    token    real tokens
    seq      B
    logits   rows with logits
    block    KV blocks of the longest sequence
    position the three positions of a token: time, row and column

    A new field declares no more than this: the builder reserves memory by it, and `ubatch` cuts the first axis.
    """

    def __init__(self, *axes: Axis):
        self.axes = axes


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionBatch:
    """What attention reads of a forward. Sequences with one row come first, then those that verify drafts.

    Tensors live on the device; arrays named `_cpu` live on the host.

    num_tokens            real tokens; the rows behind them are padding with undefined but finite output
    num_seqs              sequences
    num_single_rows       how many of them, the first ones, have one row: a decode, or the last token of a prompt
    num_verify            how many sequences behind them verify drafts: they have the row of a decode, then one a draft
    rows_before           rows of the first sequence that earlier ubatches compute in this step, if it verifies drafts
    query_start_loc_cpu   int32 [B+1]: the row of each sequence's first new token; the last entry is num_tokens
    seq_lens_cpu          int32 [B]: context and new tokens
    block_table           int64 [B, max_blocks]: entries behind a sequence's blocks are 0
    slot_mapping          int64 [num_tokens]: block * block_size + offset of each new token; -1: K and V are not written
    window_block_table, window_slot_mapping   the same for layers with a window, with old blocks freed: their
                          entries are any; None: no layer has a window
    state_slots           int64 [B]: slot of each sequence in the pools of linear attention; a sequence with context has
                          a state there. None: no layer has linear attention
    prefix_groups_cpu     int32 [B]: sequences with equal numbers have the same leading blocks, -1: no other sequence is
                          known to have them. None: not looked for
    prefix_blocks_cpu     int32 [B]: how many leading blocks these sequences have in common, all of computed tokens
    behind                int64 [B]: by how many tokens each sequence is shorter than in seq_lens_cpu; None: by none.
                          GraphAttention.follows has the plans that take it
    """

    num_tokens: int
    num_seqs: int
    num_single_rows: int
    query_start_loc_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    block_table: Annotated[torch.Tensor, Shape("seq", "block")]
    slot_mapping: Annotated[torch.Tensor, Shape("token")]
    window_block_table: Annotated[torch.Tensor | None, Shape("seq", "block")] = None
    window_slot_mapping: Annotated[torch.Tensor | None, Shape("token")] = None
    state_slots: Annotated[torch.Tensor | None, Shape("seq")] = None
    prefix_groups_cpu: Annotated[np.ndarray | None, Shape("seq")] = None
    prefix_blocks_cpu: Annotated[np.ndarray | None, Shape("seq")] = None
    behind: Annotated[torch.Tensor | None, Shape("seq")] = None
    num_verify: int = 0
    rows_before: int = 0

    _shapes: ClassVar[Mapping[str, tuple[Axis, ...]]]

    @classmethod
    def shapes(cls) -> Mapping[str, tuple[Axis, ...]]:
        """Return the axes of each field that is annotated with a Shape, in order of declaration."""
        if "_shapes" not in vars(cls):
            hints = get_type_hints(cls, include_extras=True)
            cls._shapes = {
                name: shape.axes
                for name, hint in hints.items()
                for shape in getattr(hint, "__metadata__", ())
                if isinstance(shape, Shape)
            }
        return cls._shapes

    @property
    def num_decodes(self) -> int:
        """Sequences with one row, or with drafts: the first ones."""
        return self.num_single_rows + self.num_verify

    @property
    def num_prompts(self) -> int:
        """Sequences behind them: prompts of several rows."""
        return self.num_seqs - self.num_decodes

    def blocks_of(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block table and the slot mapping of layers with this window."""
        if window is None:
            return self.block_table, self.slot_mapping
        assert self.window_block_table is not None and self.window_slot_mapping is not None
        return self.window_block_table, self.window_slot_mapping

    @staticmethod
    def dummy_decodes(count: int, device: torch.device) -> "AttentionBatch":
        """Return `count` decodes to plan attention for a capture; their K and V are not written."""
        block_table = torch.zeros(count, 1, dtype=torch.int64, device=device)
        slot_mapping = torch.full((count,), -1, dtype=torch.int64, device=device)
        return AttentionBatch(
            num_tokens=count,
            num_seqs=count,
            num_single_rows=count,
            query_start_loc_cpu=np.arange(count + 1, dtype=np.int32),
            seq_lens_cpu=np.ones(count, dtype=np.int32),
            block_table=block_table,
            slot_mapping=slot_mapping,
            window_block_table=block_table,
            window_slot_mapping=slot_mapping,
        )

    @staticmethod
    def dummy_states(
        num_rows: int, rows_per_seq: int, max_seqs: int, device: torch.device
    ) -> "AttentionBatch":
        """Return sequences of about `rows_per_seq` rows to time linear attention: with states in the first slots."""
        count = min(max_seqs, -(-num_rows // rows_per_seq))
        num_rows = min(num_rows, count * rows_per_seq)
        sizes = np.sort(np.diff(np.arange(count + 1) * num_rows // count)).astype(np.int32)
        num_single = int((sizes == 1).sum())
        return AttentionBatch(
            num_tokens=num_rows,
            num_seqs=count,
            num_single_rows=num_single,
            num_verify=count - num_single,
            query_start_loc_cpu=np.cumsum([0, *sizes], dtype=np.int32),
            seq_lens_cpu=sizes + np.int32(1),
            block_table=torch.zeros(count, 1, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            state_slots=torch.arange(1, count + 1, device=device),
        )

    def ubatch(self, start: int, end: int) -> Self:
        """Return a view of rows `start` to `end`. It has no rows with logits.

        A sequence may straddle a border. Its part in the later ubatch continues a chunked prefill, and its context
        includes the earlier part; so in each layer the attention of earlier ubatches must run first.
        """
        return replace(self, **self._cut(start, end))

    def _cut(self, start: int, end: int) -> dict[str, Any]:
        """The fields of a ubatch that differ from the fields of this batch."""
        starts = self.query_start_loc_cpu
        last = max(start, min(end, self.num_tokens))  # behind the last real token of the ubatch
        first_seq = end_seq = self.num_seqs
        if start < last:
            first_seq = int(starts.searchsorted(start, side="right")) - 1
            end_seq = int(starts.searchsorted(last, side="left"))
        query_start_loc = starts[first_seq : end_seq + 1] - np.int32(start)
        query_start_loc[0], query_start_loc[-1] = 0, last - start
        seq_lens = self.seq_lens_cpu[first_seq:end_seq].copy()
        if end_seq > first_seq:
            seq_lens[-1] -= starts[end_seq] - last  # tokens that the next ubatch computes
        bounds: dict[Axis, slice] = {
            "row": slice(start, end),
            "token": slice(start, last),
            "seq": slice(first_seq, end_seq),
        }
        cut = {
            name: getattr(self, name)[bounds.get(axes[0], _NOTHING)]
            for name, axes in self.shapes().items()
            if axes and getattr(self, name) is not None
        }
        num_single = max(0, min(self.num_single_rows, end_seq) - first_seq)
        num_decodes = max(0, min(self.num_decodes, end_seq) - first_seq)
        rows_before = 0
        if self.num_single_rows <= first_seq < self.num_decodes:
            rows_before = start - int(starts[first_seq]) + self.rows_before * (first_seq == 0)
        return {
            **cut,
            "num_tokens": last - start,
            "num_seqs": end_seq - first_seq,
            # One-token parts of longer sequences are computed like prompts, because their other parts are.
            "num_single_rows": num_single,
            "num_verify": num_decodes - num_single,
            "rows_before": rows_before,
            "seq_lens_cpu": seq_lens,
            "query_start_loc_cpu": query_start_loc,
        }
