"""Vectors of prompts, in the place of tokens: pooled hidden states, or logits of classes or of a few tokens.

Hidden states are the model's, after its final norm. Knows nothing of scheduling and of the tasks of a server.

T rows of a forward, N rows that count, S sequences with such rows, P vectors that a forward completes, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.models.decoder import DecoderLM
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import ScheduledSequence, Sequence
from workers.wire.request import PoolingParams

ToHost = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Vectors:
    """The vectors of P sequences of a batch. Those of one kind of output are the rows of one tensor.

    groups    float32 [p, n], and the index in the batch and the parameters of each of the p sequences
    """

    groups: list[tuple[torch.Tensor, list[tuple[int, PoolingParams]]]]

    def to(self, copy: ToHost) -> "Vectors":
        """Return a copy with tensors copied by `copy`."""
        return Vectors([(copy(rows), members) for rows, members in self.groups])

    def lists(self, num_seqs: int) -> list[np.ndarray | None]:
        """Return the vector of each of the `num_seqs` sequences of the batch, None where none is complete."""
        found: list[np.ndarray | None] = [None] * num_seqs
        for rows, members in self.groups:
            for (index, params), row in zip(members, rows.numpy(), strict=True):
                found[index] = _finished(row, params)
        return found


def _finished(row: np.ndarray, params: PoolingParams) -> np.ndarray:
    """Cut and normalise an embedding."""
    if params.dimensions is not None:
        row = row[: params.dimensions]
    if not params.normalize:
        return row
    length = np.linalg.norm(row)
    return row / length if length else row


class PoolingHead:
    """Pools the hidden states of prompts while they are prefilled, in one step or in chunks."""

    def __init__(self, model: DecoderLM):
        self._model = model
        # By row of the sequence: the sum of its rows so far, and their number. Until the vector is complete or another
        # sequence moves in.
        self._partial: dict[int, tuple[torch.Tensor, int]] = {}

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row. It is computed from its first token on if all its rows count."""
        self._partial.pop(seq.row, None)
        assert (
            not seq.num_computed_tokens or not seq.request.needs_every_row or seq.num_output_tokens
        ), "cached tokens have no hidden states"

    def collect(
        self, batch: ScheduledBatch, query_start_loc: np.ndarray, hidden_TD: torch.Tensor
    ) -> Vectors | None:
        """Add the rows of a forward before the final norm; return the vectors that are now complete, None without any.

        query_start_loc int32 [B+1]: start of each sequence's new tokens in hidden_TD.
        """
        if not batch.pooled_seqs:
            return None
        chosen = [(index, batch.parts[index]) for index in batch.pooled_seqs]
        sums_SD = self._sums(chosen, query_start_loc, hidden_TD)
        ended: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for place, (_, part) in enumerate(chosen):
            count, row = len(part.hidden_rows), part.seq.row
            if row in self._partial:
                before_D, num_before = self._partial.pop(row)
                sums_SD[place] += before_D
                count += num_before
            if not part.ends_vector:
                self._partial[row] = sums_SD[place].clone(), count
                continue
            if count > 1:
                sums_SD[place] /= count
            params = _params(part)
            ended.setdefault((params.output, params.token_ids), []).append(place)
        if not ended:
            return None
        return Vectors([self._group(chosen, sums_SD, places) for places in ended.values()])

    def _sums(
        self,
        chosen: list[tuple[int, ScheduledSequence]],
        query_start_loc: np.ndarray,
        hidden_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Return float32 [S, D], the sum of the rows of each sequence that count, after the final norm."""
        starts, rows = query_start_loc.tolist(), [part.hidden_rows for _, part in chosen]
        lengths = [len(of_seq) for of_seq in rows]
        index_N = np.concatenate(
            [
                np.arange(starts[index] + of_seq.start, starts[index] + of_seq.stop)
                for (index, _), of_seq in zip(chosen, rows, strict=True)
            ]
        )
        device = hidden_TD.device
        normed_ND = self._model.norm(hidden_TD.index_select(0, to_device(index_N, device))).float()
        if all(length == 1 for length in lengths):
            return normed_ND
        # One sum a sequence: segment_reduce takes ten times as long on a CPU, because it sums column by column.
        return torch.stack([rows_nD.sum(0) for rows_nD in torch.split(normed_ND, lengths)])

    def _group(
        self, chosen: list[tuple[int, ScheduledSequence]], sums_SD: torch.Tensor, places: list[int]
    ) -> tuple[torch.Tensor, list[tuple[int, PoolingParams]]]:
        members = [(chosen[place][0], _params(chosen[place][1])) for place in places]
        pooled_PD = sums_SD
        if len(places) < len(chosen):
            pooled_PD = sums_SD.index_select(0, to_device(np.array(places), sums_SD.device))
        params = members[0][1]
        if params.output == "embedding":
            return pooled_PD, members
        rows_PD = pooled_PD.to(self._model.dtype)
        if params.output == "classes":
            assert self._model.score is not None, "the checkpoint has no classification head"
            return self._model.score(rows_PD).float(), members
        assert self._model.lm_head is not None, "the checkpoint has no logits"
        token_ids = to_device(np.array(params.token_ids), rows_PD.device)
        weight = self._model.lm_head.weight.index_select(0, token_ids)
        logits = torch.nn.functional.linear(rows_PD, weight).float()
        logits *= self._model.config.logits_factor
        return logits if len(token_ids) == 1 else logits[:, 1:] - logits[:, :1], members


def _params(part: ScheduledSequence) -> PoolingParams:
    pooling = part.seq.request.pooling
    assert pooling is not None, f"{part.seq.request.request_id} generates"
    return pooling
