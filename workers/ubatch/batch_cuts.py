"""Where a step is cut into ubatches, and its batch cut there. Views only; `AttentionBatch.ubatch` makes each view."""

from itertools import pairwise
from typing import TypeVar

from kernels.attention.batch import AttentionBatch
from workers.step.step_sync import ubatch_borders

Batch = TypeVar("Batch", bound=AttentionBatch)


def ubatch_rows(num_rows: int, num_ubatches: int) -> list[tuple[int, int]]:
    """Return the first row of each ubatch and the row behind its last; all have as equal numbers of rows as can be."""
    assert num_rows >= num_ubatches, f"{num_rows} rows cannot be cut into {num_ubatches} ubatches"
    return list(pairwise(ubatch_borders(num_rows, num_ubatches)))


def cut(batch: Batch, num_rows: int, num_ubatches: int) -> list[Batch]:
    """Return the ubatches of `batch`, which has `num_rows` rows, padding included."""
    return [batch.ubatch(start, end) for start, end in ubatch_rows(num_rows, num_ubatches)]
