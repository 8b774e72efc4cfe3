"""Which running sequences begin with the same KV blocks, so that attention can read these blocks once for all of them.

The blocks that two sequences share were found in the prefix cache when the later one started, and stay equal until one
of them ends. So groups are computed anew only after a sequence with shared blocks has started or ended, and a step
takes two numbers a row. A sequence is in one group at most: of nested prefixes that of which most reads are saved.

R rows, B blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FIRST_COLUMNS = 64  # of the table, compared at a time; then twice as many


@dataclass(slots=True)
class _Node:
    """Rows with equal blocks up to `end`. saved: reads of blocks, by this group or by the groups of its parts."""

    rows: np.ndarray
    end: int
    parent: int
    saved: int = 0
    is_group: bool = False


def group_prefixes(table_RB: np.ndarray, limits_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the group of each row, int32 [R], -1 for none, and the leading blocks its rows share, int32 [R].

    table    int64 [R, B]; entries from limits (int [R]) on are not compared
    """
    groups, blocks = np.full(len(table_RB), -1, np.int32), np.zeros(len(table_RB), np.int32)
    nodes = _tree(table_RB, limits_R)
    for node in reversed(nodes):
        alone = (len(node.rows) - 1) * node.end
        node.is_group = alone >= node.saved
        node.saved = max(alone, node.saved)
        if node.parent >= 0:
            nodes[node.parent].saved += node.saved
    inside = [False] * len(nodes)
    for number, node in enumerate(nodes):  # a node follows its parent
        if node.parent >= 0 and inside[node.parent]:
            inside[number] = True
        elif node.is_group:
            inside[number] = True
            groups[node.rows], blocks[node.rows] = node.rows[0], node.end
    return groups, blocks


def _tree(table_RB: np.ndarray, limits_R: np.ndarray) -> list[_Node]:
    """Return the prefixes that two or more rows share, each behind the prefix that contains it."""
    nodes: list[_Node] = []
    open_nodes = [(rows, 0, -1) for rows in _equal(table_RB, np.flatnonzero(limits_R > 0), 0)]
    while open_nodes:
        rows, start, parent = open_nodes.pop()
        end = _common(table_RB, rows, start, int(limits_R[rows].min()))
        nodes.append(_Node(rows, end, parent))
        longer = rows[limits_R[rows] > end]
        open_nodes += [(part, end, len(nodes) - 1) for part in _equal(table_RB, longer, end)]
    return nodes


def _equal(table_RB: np.ndarray, rows: np.ndarray, column: int) -> Iterator[np.ndarray]:
    """Yield the rows, two or more, that have equal entries in a column."""
    if len(rows) < 2:
        return
    entries = table_RB[rows, column]
    order = np.argsort(entries, kind="stable")
    cuts = np.flatnonzero(np.diff(entries[order])) + 1
    yield from (part for part in np.split(rows[order], cuts) if len(part) > 1)


def _common(table_RB: np.ndarray, rows: np.ndarray, start: int, limit: int) -> int:
    """Return the first column from `start` on, at most `limit`, in which the rows differ."""
    width = FIRST_COLUMNS
    while start < limit:
        end = min(start + width, limit)
        same = (table_RB[rows, start:end] == table_RB[rows[0], start:end]).all(0)
        if not same.all():
            return start + int(same.argmin())
        start, width = end, 2 * width
    return limit


class PrefixGroups:
    """The groups of the running sequences, by row of the block table."""

    def __init__(self, table: np.ndarray):
        """Take int64 [rows, blocks], the block table of layers over all tokens."""
        self._table = table
        self._groups = np.full(len(table), -1, np.int32)
        self._blocks = np.zeros(len(table), np.int32)
        self.changed = False

    def started(self, num_found: int) -> None:
        """Enter a sequence that starts with `num_found` blocks of the prefix cache."""
        self.changed |= num_found > 0

    def ended(self, row: int) -> None:
        """Enter the end of the sequence in this row."""
        self.changed |= self._groups[row] >= 0
        self._groups[row] = -1

    def update(self, rows: np.ndarray, limits: np.ndarray) -> None:
        """Compute the groups of the running sequences anew; `limits` are the blocks that each holds."""
        self.changed = False
        groups, blocks = group_prefixes(self._table[rows, : int(limits.max(initial=0))], limits)
        self._groups.fill(-1)
        self._groups[rows], self._blocks[rows] = groups, blocks

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return group and shared blocks of these rows; see AttentionBatch."""
        groups = self._groups[rows]
        return groups, np.where(groups >= 0, self._blocks[rows], 0)
