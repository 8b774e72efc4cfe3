"""Builds a `ForwardBatch` from the sequences of a step, in persistent buffers and without loops over tokens.

All integers of a forward lie in one host array, so that one copy from pinned memory brings them to a GPU.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from kernels.attention.batch import Axis
from kernels.host.host_copy import to_device
from workers.kv_cache.manager import KVCacheManager
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.runner.image_rows import ImageRows
from workers.step.forward_batch import ForwardBatch, resolve_pending
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch

# Fields of layers that a model may lack.
OPTIONAL = frozenset(field.name for field in fields(ForwardBatch) if field.default is None)
_Place = tuple[int, int, tuple[int, ...]]  # begin, end, and the shape of each row
_MAX_VIEWS = 1024
_ALIGNMENT = 16  # integers; kernels are compiled anew for fields that are not aligned


class _Staging:
    """Host memory for the device fields of one forward, and its twin on the device; on CPU both are the same memory.

    On GPUs two host arrays take turns, because the copy of the forward before may still be in flight. Fields of one
    integer or of T rows come first: their addresses on the device depend on T alone, as a CUDA graph needs it.
    """

    def __init__(
        self,
        batch_type: type[ForwardBatch],
        largest: Mapping[Axis, int],
        device: torch.device,
        omitted: Collection[str],
    ):
        declared = batch_type.shapes().items()
        fields = [
            (name, axes)
            for name, axes in declared
            if not name.endswith("_cpu") and name not in omitted
        ]
        fields.sort(key=lambda one: one[1][:1] not in ((), ("row",)))
        self._fields = [(name, axes[:1] == ("row",)) for name, axes in fields]
        size = sum(_aligned(math.prod(largest[axis] for axis in axes)) for _, axes in fields)
        cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.int64, pin_memory=cuda) for _ in range(1 + cuda)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = torch.zeros(size, dtype=torch.int64, device=device) if cuda else None
        self._turn = 0
        self._views: dict[_Place, torch.Tensor] = {}

    def ship(self, num_rows: int, values: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return each value on the device by its field's name; fields of rows are padded with 0 to `num_rows`."""
        host, array = self._hosts[self._turn], self._arrays[self._turn]
        self._turn = (self._turn + 1) % len(self._hosts)
        places: dict[str, _Place] = {}
        used = 0
        for name, padded in self._fields:
            value = values[name]
            size = num_rows * math.prod(value.shape[1:]) if padded else value.size
            filled = used + value.size
            array[used:filled].reshape(value.shape)[...] = value
            if filled < used + size:
                array[filled : used + size] = 0
            places[name] = used, used + size, value.shape[1:]
            used = _aligned(used + size)
        there = host
        if self._device is not None:
            there = self._device
            there[:used].copy_(host[:used], non_blocking=True)
        return {name: self._view(there, place) for name, place in places.items()}

    def _view(self, there: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the part of `there` at a place; steps of one size share the views, which take 2 us each to make."""
        view = self._views.get(place)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            start, end, columns = place
            view = there[start:end].view(-1, *columns) if columns else there[start:end]
            self._views[place] = view
        return view


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class ForwardBatchBuilder:
    """Owns the buffers of one rank. `max_num_tokens` bounds T, `max_num_seqs` bounds B.

    adapters      sequences may have adapters
    shares        attention may read leading blocks that sequences share once
    images        where the embeddings of images go; None: there are no images
    accepted      tokens, and drafts that count, which are not yet on the host
    """

    def __init__(
        self,
        table: InputBatch,
        cache: KVCacheManager,
        max_num_tokens: int,
        max_num_seqs: int,
        device: torch.device,
        *,
        adapters: bool = False,
        shares: bool = False,
        images: ImageRows | None = None,
        accepted: AcceptedDrafts | None = None,
    ):
        self.last_tokens = None if accepted is None else accepted.last_tokens
        self.max_num_tokens = max_num_tokens
        self._accepted = accepted
        self._table, self._cache, self._shares = table, cache, shares
        self._adapters, self._images = adapters, images
        largest: dict[Axis, int] = {
            "row": max_num_tokens,
            "token": max_num_tokens,
            "seq": max_num_seqs,
            "logits": max_num_tokens,
            "block": cache.max_blocks,
            "position": 3,
        }
        omitted = OPTIONAL - cache.batch_fields - ({"adapter_slots"} if adapters else set())
        omitted -= frozenset() if images is None else images.fields
        self._staging = _Staging(ForwardBatch, largest, device, omitted)

    def build(
        self,
        batch: ScheduledBatch,
        num_rows: int,
        *,
        graph: bool = False,
        adapters: bool = False,
        follows: bool = False,
    ) -> ForwardBatch:
        """Return the tensors of `batch`, padded to `num_rows` rows.

        graph      for a CUDA graph: it resolves pending tokens itself and reads the number of tokens on the device
        adapters   rows may have adapters, on this rank or on another one
        follows    attention takes `AttentionBatch.behind`: sequences with a length that only the device has are the
                   longest possible ones on the host. Without, the host waits for the device where there are such
        """
        num_tokens, query_start_loc = batch.num_tokens, batch.query_start_loc
        assert num_tokens <= num_rows, f"{num_tokens} tokens do not fit in {num_rows} rows"
        rows, row_of_token = batch.rows, batch.row_of_token
        starts, unknown = self._starts(rows, follows=follows)
        positions = batch.positions(starts)
        ends = starts + batch.num_new_tokens
        sampling_rows = rows[batch.logits_seqs]
        lengths = _lengths(batch, ends)
        self._enter_drafts(batch, sampling_rows, lengths["sampling_positions_cpu"])
        device: dict[str, Any] = self._staging.ship(
            num_rows,
            self._cache.fields(rows, row_of_token, positions, int(ends.max(initial=1)))
            | {
                "num_token_non_padded": np.array([num_tokens]),
                "input_ids": self._input_ids(batch, positions, unknown),
                "positions": positions,
                "logits_indices": batch.logits_rows,
                "sampling_rows": sampling_rows,
            }
            | self._slots(row_of_token)
            | self._place_images(batch, starts, query_start_loc, (row_of_token, positions)),
        )
        if follows and unknown.any():
            device["behind"] = self._step_back(batch, device, np.where(unknown, rows, -1))
        if not adapters:
            device.pop("adapter_slots", None)
        self._add_embeds(device, num_rows, graph=graph)
        if not graph:
            device["num_token_non_padded"] = num_tokens
            if self.last_tokens is not None:
                device["input_ids"] = resolve_pending(device["input_ids"], self.last_tokens)
        return ForwardBatch(
            num_tokens=num_tokens,
            num_seqs=len(rows),
            num_single_rows=batch.num_single_rows,
            spread_copies=batch.has_prompts,
            num_verify=batch.num_verify,
            query_start_loc_cpu=query_start_loc,
            sampling_rows_cpu=sampling_rows,
            **lengths,
            **self._prefixes(batch),
            **device,
        )

    def _starts(self, rows: np.ndarray, *, follows: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return how many tokens of each sequence are computed, and of which the device alone has the number."""
        table = self._table
        starts, unknown = table.num_computed_tokens[rows], table.has_unknown_lengths(rows)
        if not follows and unknown.any():
            assert self._accepted is not None, "drafts are in flight, but the runner reads them"
            starts = starts - np.where(unknown, self._accepted.read(rows), 0)
        return starts, unknown

    def _input_ids(
        self, batch: ScheduledBatch, positions: np.ndarray, unknown_B: np.ndarray
    ) -> np.ndarray:
        """Return the token of each row, or where the device finds it."""
        ids: np.ndarray = self._table.token_ids[batch.row_of_token, positions]
        if unknown_B.any():  # the table has drafts there
            ids[batch.query_start_loc[:-1][unknown_B]] = -1 - batch.rows[unknown_B]
        return ids

    def _step_back(
        self, batch: ScheduledBatch, fields: dict[str, torch.Tensor], rows_B: np.ndarray
    ) -> torch.Tensor:
        """Move the tokens of sequences back by their rejected drafts, on the device; return by how many, int64 [B].

        rows_B    rows in the InputBatch; -1: the sequence stays
        """
        assert self._accepted is not None and "window_slot_mapping" not in fields
        rejected_R, size = self._accepted.rejected_R, self._cache.block_size
        if self._accepted.fused:
            from kernels.triton.drafts_behind import step_back

            seqs_3B = np.stack((rows_B, batch.query_start_loc[:-1], batch.num_new_tokens))
            return step_back(
                to_device(seqs_3B, rejected_R.device),
                rejected_R,
                fields["positions"],
                fields.get("rope_positions"),
                fields["block_table"],
                fields["slot_mapping"],
                size,
            )
        seqs = np.arange(len(rows_B)).repeat(batch.num_new_tokens)
        packed = to_device(np.concatenate((rows_B, rows_B[seqs], seqs)), rejected_R.device)
        row_N = packed[: len(rows_B) + len(seqs)]
        back_N = torch.where(row_N < 0, 0, rejected_R.index_select(0, row_N.clamp(min=0)))
        back_B, back_T = back_N[: len(rows_B)], back_N[len(rows_B) :]
        seq_T, count = packed[len(row_N) :], len(seqs)
        positions_T = fields["positions"][:count].sub_(back_T)
        if "rope_positions" in fields:
            fields["rope_positions"][:count].sub_(back_T[:, None])
        blocks_T = fields["block_table"][seq_T, positions_T // size]
        torch.add(blocks_T * size, positions_T % size, out=fields["slot_mapping"][:count])
        return back_B

    def warm_up(self) -> None:
        """Compile what a step behind drafts of the device launches: no step of the start has such drafts."""
        if self._accepted is not None and self._accepted.fused:
            from kernels.triton.drafts_behind import step_back

            rejected_R = self._accepted.rejected_R
            none = rejected_R.new_full((3, 1), -1)
            step_back(none, rejected_R, none[0], None, none, none[0], self._cache.block_size)

    def settled(self, scheduled: ScheduledBatch, batch: ForwardBatch) -> ForwardBatch:
        """Return a launched batch with the lengths that the host has learnt since it was built, if any."""
        if batch.behind is None:
            return batch
        ends = self._table.num_computed_tokens[scheduled.rows]
        return replace(batch, **_lengths(scheduled, ends), behind=None)

    def _prefixes(self, batch: ScheduledBatch) -> dict[str, Any]:
        """Return the groups of sequences with shared blocks; only sequences with one row read shared blocks once."""
        shares = self._shares and batch.num_single_rows > 1
        return self._cache.shared_prefixes(batch.rows) if shares else {}

    def _enter_drafts(
        self, batch: ScheduledBatch, rows_L: np.ndarray, positions_L: np.ndarray
    ) -> None:
        """Copy drafts, or their references, to the table: the draw of a row verifies the draft in its place."""
        if batch.draft_token_ids is not None:
            verify = batch.verify_logits
            place = rows_L[verify], positions_L[verify]
            self._table.token_ids[place] = batch.draft_token_ids[verify]

    def _place_images(
        self,
        batch: ScheduledBatch,
        starts: np.ndarray,
        query_start_loc: np.ndarray,
        tokens: tuple[np.ndarray, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """tokens: table row and position of each."""
        if self._images is None:
            return {}
        rows, positions = tokens
        behind = positions + self._table.rope_deltas[rows]
        return self._images.place(batch, starts, query_start_loc, behind)

    def _add_embeds(self, fields: dict[str, Any], num_rows: int, *, graph: bool) -> None:
        """Add the embeddings of images; without any, and without a graph, leave out the mask too."""
        if self._images is not None and (graph or self._images.any):
            fields["image_embeds"] = self._images.embeds_TXD[:num_rows]
        else:
            fields.pop("image_mask", None)

    def _slots(self, row_of_token: np.ndarray) -> dict[str, np.ndarray]:
        if not self._adapters:
            return {}
        return {"adapter_slots": self._table.adapter_slots[row_of_token]}


def _lengths(batch: ScheduledBatch, ends_B: np.ndarray) -> dict[str, Any]:
    """Return the fields that follow from the number of tokens of each sequence, new ones included."""
    return {
        "seq_lens_cpu": ends_B.astype(np.int32),
        "sampling_positions_cpu": ends_B[batch.logits_seqs] - batch.logits_behind,
    }
