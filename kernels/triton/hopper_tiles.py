"""Tiles of the experts' permuted rows, found by each group of warps of a kernel in Gluon for itself.

e local experts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def list_tiles(bounds, ROWS: gl.constexpr, NUM_EXPERTS: gl.constexpr, EXPERTS_2: gl.constexpr):
    """Return experts, starts and ends of their rows, and the row tiles up to each expert's last, in registers."""
    starts_ptr, ends_ptr = bounds
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    experts = gl.arange(0, EXPERTS_2, line)
    starts = gl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = gl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    tile_ends = gl.associative_scan((ends - starts + ROWS - 1) // ROWS, 0, _add)
    return experts, starts, ends, tile_ends


@gluon.jit
def count_tiles(tiles, ROWS: gl.constexpr):
    """Return the number of row tiles."""
    _, starts, ends, _ = tiles
    return gl.sum((ends - starts + ROWS - 1) // ROWS, 0)


@gluon.jit
def find_tile(row_tile, tiles, ROWS: gl.constexpr):
    """Return expert, first permuted row and end of the expert's rows, of the row_tile-th tile of all rows."""
    experts, starts, ends, tile_ends = tiles
    expert = gl.sum((tile_ends <= row_tile).to(gl.int32), 0)
    here = (experts == expert).to(gl.int32)
    first_tile = gl.sum(here * (tile_ends - (ends - starts + ROWS - 1) // ROWS), 0)
    start = gl.sum(here * starts, 0) + (row_tile - first_tile) * ROWS
    return expert, start, gl.sum(here * ends, 0)


@gluon.jit
def rows_of(permuted, end, row_ptr, INDEXED: gl.constexpr):
    """Return the rows of x of permuted rows; beyond the end they repeat the last row, so that no load needs a mask."""
    rows = gl.minimum(permuted, end - 1)
    if INDEXED:
        rows = gl.load(row_ptr + rows)
    return rows.to(gl.int64)
