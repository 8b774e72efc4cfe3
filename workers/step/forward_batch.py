"""`ForwardBatch`: all tensors of one forward. Knows nothing of requests; `batch_builder` fills it.

T rows (padding included), B sequences, L rows with logits, X outputs of a vision tower, D hidden.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch, Shape
from kernels.lora.rows import AdapterRows
from workers.step.step_sync import ForwardMode


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch(AttentionBatch):
    """One forward, or a ubatch of it. The next forward overwrites the tensors.

    A new field is declared here once, with its shape, and filled in ForwardBatchBuilder.build.

    num_token_non_padded   num_tokens as the model reads it: an int, or int64 [1] on the device for a CUDA graph
    input_ids              int64 [T]; padding rows hold token 0; -1 - row is the token drawn last in that table row, see
                           InputBatch
    positions              int64 [T]; padding rows hold 0
    logits_indices         int64 [L]: rows with logits, from each of which a token is drawn
    sampling_rows          int64 [L]: row in the InputBatch of the sequence of each of them, here and on the host
    sampling_positions_cpu int64 [L]: position of the token to be drawn
    spread_copies          rows take all copies of their experts in turn, because prompts bring many rows; otherwise one
                           copy of each expert, because decodes read weights
    adapter_slots          int64 [T]: slot of each row's adapter, 0 for none; None: no row of any rank has an adapter
    rope_positions         int64 [T, 3]: positions of rows for the rotary embedding; None: `positions` three times
    image_mask             int64 [T]: 1 for a row of an image, else 0; None: no row is of an image
    image_embeds           [T, X, D] in the model's dtype, of rows of images: the embedding, then what the first layers
                           add; of other rows 0 behind the first output. None as `image_mask`
    """

    num_token_non_padded: Annotated[int | torch.Tensor, Shape()]
    input_ids: Annotated[torch.Tensor, Shape("row")]
    positions: Annotated[torch.Tensor, Shape("row")]
    logits_indices: Annotated[torch.Tensor, Shape("logits")]
    sampling_rows: Annotated[torch.Tensor, Shape("logits")]
    sampling_rows_cpu: Annotated[np.ndarray, Shape("logits")]
    sampling_positions_cpu: Annotated[np.ndarray, Shape("logits")]
    spread_copies: bool = True
    adapter_slots: Annotated[torch.Tensor | None, Shape("row")] = None
    rope_positions: Annotated[torch.Tensor | None, Shape("row", "position")] = None
    image_mask: Annotated[torch.Tensor | None, Shape("row")] = None
    image_embeds: Annotated[torch.Tensor | None, Shape("row")] = None

    @property
    def forward_mode(self) -> ForwardMode:
        """EXTEND, DECODE, MIXED or IDLE; of a ubatch, that of its own rows."""
        return ForwardMode.of(self.num_seqs, self.num_single_rows)

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.input_ids)

    @cached_property
    def adapters(self) -> AdapterRows | None:
        """The rows by their adapters; None: no row of any rank has one."""
        return None if self.adapter_slots is None else AdapterRows.of(self.adapter_slots)

    def resolved(self, last_tokens: torch.Tensor | None) -> Self:
        """Return the batch with tokens in place of all references to `last_tokens`, int64 [at least table rows]."""
        if last_tokens is None:
            return self
        return replace(self, input_ids=resolve_pending(self.input_ids, last_tokens))

    def _cut(self, start: int, end: int) -> dict[str, Any]:
        cut = super()._cut(start, end)
        count = cut["num_tokens"]
        if isinstance(self.num_token_non_padded, torch.Tensor):
            count = (self.num_token_non_padded - start).clamp_(0, end - start)
        return cut | {"num_token_non_padded": count}


def resolve_pending(input_ids: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """Return input_ids with the tokens that only the device has: last_tokens int64 [at least table rows]."""
    row_T = (-1 - input_ids).clamp_(min=0)
    return torch.where(input_ids < 0, last_tokens.index_select(0, row_T), input_ids)
