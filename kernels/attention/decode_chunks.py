"""How decodes are cut into chunks of keys, which programs of a kernel compute side by side. Pure.

One program a sequence leaves most of a GPU idle where there are few sequences, or where one is much longer than the
others. R rows, a decode each; the last rows may be empty. C chunks.
"""

from dataclasses import dataclass, replace

import numpy as np

TILE_KEYS = 64  # keys that a program reads at a time; chunks are multiples
MIN_CHUNK = 256
# Sequences up to this length, or up to SLACK even chunks that fill the GPU, are left whole: the merge costs a launch.
WHOLE_KEYS = 512
SLACK = 1.5


@dataclass(frozen=True)
class DecodeChunks:
    """The chunks of all rows, in order of rows; each row has one or more, an empty row one without keys.

    seqs         int32 [C]      row of the chunk, -1 for none
    firsts, ends int32 [C]      its keys, counted from the sequence's first token
    starts       int32 [R + 1]  first chunk of each row
    """

    seqs: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    starts: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All arrays, in the order of declaration."""
        return self.seqs, self.firsts, self.ends, self.starts


def max_chunks(num_rows: int, programs: int) -> int:
    """Return the most chunks of `num_rows` rows, at least one more than rows. programs: that a GPU runs at a time.

    Twice as many as fill the GPU end at about the same time: 126 rows of 512 keys and two of 32,768 took 115 us in 192
    chunks, 83 us in 384 (gpt-oss, H200).
    """
    return max(2 * (num_rows + num_rows // 2), 2 * programs, num_rows + 1)


def chunk_keys(num_keys: np.ndarray, num_rows: int, most: int) -> int:
    """Return the keys of a chunk with which `num_rows` rows have at most `most` chunks; num_keys is int [up to R]."""
    share = -(-int(num_keys.sum()) // (most - num_rows))
    return max(MIN_CHUNK, -(-share // TILE_KEYS) * TILE_KEYS)


def leaves_whole(num_keys: np.ndarray, num_rows: int, most: int) -> bool:
    """Return whether cutting these rows is not worth a merge."""
    longest, filling = int(num_keys.max(initial=0)), max(most // 2, num_rows + 1)
    return longest <= max(WHOLE_KEYS, SLACK * chunk_keys(num_keys, num_rows, filling))


def read_keys(seq_lens: np.ndarray, window: int | None) -> np.ndarray:
    """Return the keys that each decode reads: those of its window, or all."""
    return seq_lens if window is None else np.minimum(seq_lens, window)


def whole_rows(seq_lens: np.ndarray, window: int | None, num_rows: int) -> DecodeChunks:
    """Return one chunk a row; rows behind `seq_lens` (int [up to R]) are empty."""
    ends = np.zeros(num_rows, np.int32)
    ends[: len(seq_lens)] = seq_lens
    rows = np.arange(num_rows + 1, dtype=np.int32)
    return DecodeChunks(rows[:-1], ends - read_keys(ends, window), ends, rows)


def cut_rows(
    seq_lens: np.ndarray,
    window: int | None,
    num_rows: int,
    most: int,
    shared: np.ndarray | None = None,
) -> DecodeChunks:
    """Return chunks of equal size in arrays of `most`; rows behind `seq_lens` (int [up to R]) are empty.

    shared   int32 [R], leading keys of each row that no chunk has; None: none
    """
    whole = whole_rows(seq_lens, window, num_rows)
    if shared is not None:
        whole = replace(whole, firsts=np.maximum(whole.firsts, shared))
    num_keys = whole.ends - whole.firsts
    size = chunk_keys(num_keys, num_rows, most)
    counts = np.maximum(1, -(-num_keys // size))
    starts = np.zeros(num_rows + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    used = int(starts[-1])
    assert used <= most, f"{used} chunks of {size} keys, at most {most} were reserved"
    seqs, firsts, ends = (np.full(most, fill, np.int32) for fill in (-1, 0, 0))
    seqs[:used] = np.repeat(whole.seqs, counts)
    firsts[:used] = np.repeat(whole.firsts, counts) + places(counts) * size
    ends[:used] = np.minimum(firsts[:used] + size, np.repeat(whole.ends, counts))
    return DecodeChunks(seqs, firsts, ends, starts)


def places(counts: np.ndarray) -> np.ndarray:
    """Return 0 .. count - 1 for each count, one after the other."""
    found: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return found
