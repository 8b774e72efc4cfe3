"""The last drafts of each sequence on the device, where the next forward finds them before the host has read them.

The host schedules and launches a step while the device still drafts behind the step before. It reads the drafts once
the forward is launched: samplers and counts of accepted drafts need their tokens.

S sequences with new tokens, K most drafts of one.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import torch

from kernels.host.host_copy import HostCopies, to_device
from workers.runner.draft_rows import DraftRows
from workers.step.drafts import Drafts
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch


@dataclass(frozen=True)
class StepDrafts:
    """The drafts of one step on their way to the host.

    table     rows of the InputBatch, int64 [S]
    drafts_SK on the host, once `copy` has ended
    """

    copy: HostCopies
    table: np.ndarray
    drafts_SK: torch.Tensor

    def read(self, index: int, count: int) -> tuple[int, ...]:
        """Return the first `count` drafts of a sequence. Waits for the device."""
        return tuple(self._tokens[index][:count])

    @cached_property
    def _tokens(self) -> list[list[int]]:
        self.copy.wait()
        found: list[list[int]] = self.drafts_SK.tolist()
        return found


class DraftStore:
    """Belongs to one runner.

    last_tokens   int64 [rows + rows * K], on the device: the last tokens of all rows of the InputBatch, then their
                  drafts; None: the host reads the drafts of a step before the next step
    """

    def __init__(self, table: InputBatch, num_drafts: int, last_tokens: torch.Tensor | None):
        num_rows = len(table.token_ids)
        self._table, self._num_rows, self._num_drafts = table, num_rows, num_drafts
        self._last_tokens = last_tokens
        self._host_RK = np.zeros((num_rows, num_drafts), dtype=np.int64)
        # Of each row the references to its drafts, by their number: 1 + num_drafts entries a row.
        self._references: list[tuple[int, ...]] = []
        if last_tokens is not None:
            firsts = (-1 - num_rows - row * num_drafts for row in range(num_rows))
            self._references = [
                tuple(range(first, first - count, -1))
                for first in firsts
                for count in range(num_drafts + 1)
            ]
        self._pending: StepDrafts | None = None

    def put(
        self, rows: DraftRows, drafts_SK: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> StepDrafts:
        """Keep the drafts of a step, and start to copy them to the host on `stream`. `settle` comes before."""
        depth = drafts_SK.shape[1]
        assert self._pending is None and depth <= self._num_drafts
        if self._last_tokens is not None and drafts_SK.numel():
            kept_RK = self._last_tokens[self._num_rows :].view(self._num_rows, -1)
            kept_RK[:, :depth].index_copy_(0, to_device(rows.table, drafts_SK.device), drafts_SK)
        if not depth:
            return StepDrafts(HostCopies(None), rows.table, drafts_SK)
        copy = HostCopies(stream)
        self._pending = StepDrafts(copy, rows.table, copy(drafts_SK))
        copy.finish()
        return self._pending

    def settle(self) -> None:
        """Read the drafts of the last step. Waits for the device."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.copy.wait()
            self._host_RK[pending.table, : pending.drafts_SK.shape[1]] = pending.drafts_SK.numpy()

    def resolve(self, scheduled: ScheduledBatch, batch: ForwardBatch) -> ScheduledBatch:
        """Return the batch with tokens in place of references to drafts, in the InputBatch too.

        `settle` comes before, and the InputBatch is as when `batch` was built.
        """
        found_L = scheduled.draft_token_ids
        if found_L is None:
            return scheduled
        late_L = scheduled.verify_logits
        late_L = late_L[found_L[late_L] < 0]
        found_L, references = found_L.copy(), found_L[late_L]
        found_L[late_L] = self._host_RK.reshape(-1)[-1 - self._num_rows - references]
        # The draw of a row verifies the draft in its place.
        place = batch.sampling_rows_cpu[late_L], batch.sampling_positions_cpu[late_L]
        self._table.token_ids[place] = found_L[late_L]
        return scheduled.with_drafts(found_L)

    def drafts_of(self, step: StepDrafts, rows: DraftRows, counts_B: np.ndarray) -> Drafts:
        """Return the drafts of the sequences of a batch, where `counts_B` draws of each count."""
        num_drafts_S = rows.num_drafts(counts_B[rows.seqs], step.drafts_SK.shape[1])
        places: dict[int, int] = dict(zip(rows.seqs.tolist(), count(), strict=False))
        if self._last_tokens is None:
            known: list[tuple[int, ...]] = [()] * len(counts_B)
            for seq, place in places.items():
                known[seq] = step.read(place, int(num_drafts_S[place]))
            return Drafts.known(known)
        found = self._referring(rows, num_drafts_S, len(counts_B))
        return Drafts(found, lambda seq: step.read(places[seq], len(found[seq])))

    def coming(self, step: StepDrafts, rows: DraftRows, num_seqs: int) -> list[tuple[int, ...]]:
        """Return references to the drafts of the sequences of a batch, before it is known how many draws count."""
        num_drafts_S = rows.num_drafts(rows.num_logits, step.drafts_SK.shape[1])
        return self._referring(rows, num_drafts_S, num_seqs)

    def _referring(
        self, rows: DraftRows, num_drafts_S: np.ndarray, num_seqs: int
    ) -> list[tuple[int, ...]]:
        references, entries = self._references, rows.table * (1 + self._num_drafts) + num_drafts_S
        found: list[tuple[int, ...]] = [()] * num_seqs
        for seq, entry in zip(rows.seqs.tolist(), entries.tolist(), strict=True):
            found[seq] = references[entry]
        return found
