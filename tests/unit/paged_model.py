"""A model that reads and writes a paged cache: one wrong, early or overwritten block, and its tokens differ."""

import random

import numpy as np

from tests.unit.schedulers import group_of, snapshots_of
from workers.kv_cache.block_groups import FullGroup, WindowGroup
from workers.scheduler.scheduler import Scheduler
from workers.step.scheduled_batch import ScheduledBatch

VOCAB = 7  # few tokens, so that equal prefixes come about by themselves too


class PagedModel:
    """A position's cache content is a hash of the token there and of the content before it; the next token follows.

    Layers with a window have slots of their own; a token finds there what its window has, or the test fails.
    Linear attention has a state for each row and snapshot; a token finds there what the token before it left, or the
    test fails. Slots that nobody may read are spoilt before every step.

    As on a device, steps are done in the order in which they come, and a token not yet committed is known here alone.
    """

    def __init__(self, scheduler: Scheduler, before: "PagedModel | None" = None):
        """`before`: the model of an earlier scheduler, whose cache this one goes on with."""
        self._table = scheduler.table
        cache = scheduler.cache
        self._window, self._block_size = cache.demand.window, cache.block_size
        self._blocks, self._window_blocks = (group_of(cache, k) for k in (FullGroup, WindowGroup))
        num_slots = cache.num_blocks * cache.block_size
        chance = random.Random(0)
        self._last_tokens = [0] * len(self._table.token_ids)
        self._content = [chance.getrandbits(60) for _ in range(num_slots)]
        if before is not None:
            self._content = before._content
        self._snapshots = snapshots_of(cache)
        self._states: dict[int, int] = {} if before is None else before._states
        self._scheduler = scheduler
        self._written: list[list[int]] = []  # slots, by step
        # Copies and slots of rows, by step.
        self._states_written: list[tuple[tuple[tuple[int, int], ...], list[int]]] = []
        self.num_tokens = 0

    def spoil(self, num_steps: int) -> None:
        """Let the last steps have written anything, as steps do that an abort has hit."""
        for slots in self._written[len(self._written) - num_steps :]:
            for slot in slots:
                self._content[slot] ^= 1 << 50
        spoilt: set[int] = set()
        for copies, rows in self._states_written[len(self._states_written) - num_steps :]:
            for (
                source,
                target,
            ) in copies:  # before the forward, of what the steps before it have left
                (spoilt.add if source in spoilt else spoilt.discard)(target)
            spoilt.update(rows)
        self._states |= dict.fromkeys(spoilt, -1)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """The new token of each sampling sequence."""
        self._written.append([])
        self._states_written.append((batch.state_copies, []))
        rows = [seq.row for seq in batch.seqs]
        if self._snapshots is not None:
            self._copy_states(batch)
        starts = self._table.num_computed_tokens[rows] if rows else np.zeros(0, dtype=np.int64)
        # As on a device: nobody sees what another sequence writes in the same step, so last ones write first.
        last = {}
        for index in reversed(range(len(rows))):
            last[index] = self._run(
                rows[index], int(starts[index]), int(batch.num_new_tokens[index])
            )
        drawn = {rows[index]: last[index] % VOCAB for index in batch.logits_seqs}
        for row, token in drawn.items():
            self._last_tokens[row] = token
        return list(drawn.values())

    def _copy_states(self, batch: ScheduledBatch) -> None:
        for source, target in batch.state_copies:
            self._states[target] = self._states[source]
        live = {seq.row + 1 for seq in self._scheduler.running if seq.num_computed_tokens}
        kept = live.union(self._snapshots.slots)
        self._states = {slot: state for slot, state in self._states.items() if slot in kept}

    def _run(self, row: int, start: int, count: int) -> int:
        self.num_tokens += count
        before = self._content[self._slot(row, start - 1)] if start else 0
        if self._snapshots is not None and start:
            assert self._states[row + 1] == before, (row, start)
        for position in range(start, start + count):
            token = int(self._table.token_ids[row, position])
            token = token if token >= 0 else self._last_tokens[-1 - token]
            before = hash((before, token, position)) % 2**61
            self._content[self._slot(row, position)] = before
            self._written[-1].append(self._slot(row, position))
            if self._window is not None:
                slot = self._slot(row, position, self._window_blocks)
                self._content[slot] = hash(("window", before))
                self._written[-1].append(slot)
                self._check_window(row, position)
        self._states[row + 1] = before
        self._states_written[-1][1].append(row + 1)
        return before

    def _check_window(self, row: int, position: int) -> None:
        for seen in range(max(0, position + 1 - self._window), position + 1):
            found = self._content[self._slot(row, seen, self._window_blocks)]
            assert found == hash(("window", self._content[self._slot(row, seen)])), (row, seen)

    def _slot(self, row: int, position: int, group: FullGroup | None = None) -> int:
        block, offset = divmod(position, self._block_size)
        return int((group or self._blocks).table[row, block]) * self._block_size + offset
