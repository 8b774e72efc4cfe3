"""How decodes that share leading keys are cut into tiles, which programs of a kernel compute side by side. Pure.

A tile is some decodes of one group with some of the keys that they share. Tiles of equal numbers of keys fill the GPU
in whole rounds. R rows, a decode each; I tiles.
"""

from dataclasses import dataclass

import numpy as np

from kernels.attention.decode_chunks import TILE_KEYS, places
from kernels.attention.shared_prefixes import MAX_GROUPS, SharedPrefixes

MIN_KEYS = 256  # of a piece; pieces are multiples of TILE_KEYS
# Reading queries and writing results of a tile takes about as long as so many keys.
TILE_COST = 64
# Rows of a tile, stacked query heads, and tiles that an SM computes at a time. Small tiles waste less on few decodes,
# large ones read K and V less often.
TILES = (64, 2), (128, 1)


@dataclass(frozen=True)
class TileShape:
    """Decodes of a tile, and tiles that a GPU computes at a time."""

    decodes: int
    programs: int

    def most(self, num_rows: int) -> int:
        """Return the most tiles of any groups of `num_rows` decodes."""
        groups = min(MAX_GROUPS, num_rows // 2)
        return num_rows // self.decodes + groups + 2 * self.programs


@dataclass(frozen=True)
class SharedChunks:
    """The tiles of all groups, and where the partial results of each decode are.

    rows            int32 [R]  decodes of all groups, group by group; behind them 0
    firsts, counts  int32 [I]  decodes of the tile: its first index in `rows`, and their number, 0 for no tile
    begins, ends    int32 [I]  keys of the tile, counted from the sequences' first token
    parts           int32 [R]  first partial result of each decode; the further ones follow `TileShape.decodes` apart
    num_parts       int32 [R]  partial results of each decode, 0 for one without shared keys
    """

    rows: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    parts: np.ndarray
    num_parts: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All arrays, in the order of declaration."""
        return (
            *(self.rows, self.firsts, self.counts, self.begins, self.ends),
            *(self.parts, self.num_parts),
        )


def tile_shape(num_rows: int, group_size: int, num_kv_heads: int, num_sms: int) -> TileShape:
    """Return the tiles for `num_rows` rows with `group_size` query heads for each KV head."""
    rows, per_sm = TILES[num_rows * group_size >= 256]
    return TileShape(max(1, rows // group_size), max(1, per_sm * num_sms // num_kv_heads))


def most_integers(max_rows: int, group_size: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the most integers of `SharedChunks` of up to `max_rows` rows."""
    shapes = [tile_shape(rows, group_size, num_kv_heads, num_sms) for rows in (1, max_rows)]
    return 3 * max_rows + 4 * max(shape.most(max_rows) for shape in shapes)


def cut_shared(shared: SharedPrefixes | None, num_rows: int, shape: TileShape) -> SharedChunks:
    """Return the tiles of the groups, in arrays that depend on `num_rows` and `shape` alone; None: no groups."""
    most = shape.most(num_rows)
    firsts, counts, begins, ends = np.zeros((4, most), np.int32)
    rows, parts, num_parts = np.zeros((3, num_rows), np.int32)
    found = SharedChunks(rows, firsts, counts, begins, ends, parts, num_parts)
    if shared is None:
        return found
    rows[: len(shared.rows)] = shared.rows
    # Tiles of decodes, then each in pieces of keys.
    per_group = -(-shared.sizes // shape.decodes)
    group = np.repeat(np.arange(len(per_group)), per_group)
    first = shared.starts[group] + places(per_group) * shape.decodes
    count = np.minimum(shape.decodes, shared.starts[group + 1] - first)
    keys = _piece_keys(per_group, shared.tokens, shape.programs)
    pieces = -(-shared.tokens // keys)[group]
    tile, used = np.repeat(np.arange(len(group)), pieces), int(pieces.sum())
    assert used <= most, f"{used} tiles, {most} were reserved"
    firsts[:used], counts[:used] = first[tile], count[tile]
    begins[:used] = places(pieces) * keys
    ends[:used] = np.minimum(begins[:used] + keys, shared.tokens[group[tile]])
    # The decodes of a tile have neighbouring places in each of its pieces.
    before = np.cumsum(pieces) - pieces
    parts[shared.rows] = np.repeat(before, count) * shape.decodes + places(count)
    num_parts[shared.rows] = np.repeat(pieces, count)
    return found


def _piece_keys(tiles: np.ndarray, tokens: np.ndarray, programs: int) -> int:
    """Return the keys of a piece with which all pieces take the shortest time, in whole rounds of `programs`.

    tiles, tokens   int [P]: tiles of decodes of each group, and the tokens that it shares
    """
    least = -(-int(tiles.sum()) // programs)
    sizes = np.arange(MIN_KEYS, max(MIN_KEYS, int(tokens.max())) + TILE_KEYS, TILE_KEYS)
    pieces = -(-tokens[:, None] // sizes[None, :])
    rounds = -(-(tiles[:, None] * pieces).sum(0) // programs)
    seconds = np.where(rounds <= least + 1, rounds * (sizes + TILE_COST), np.iinfo(np.int64).max)
    return int(sizes[seconds.argmin()])
