"""The chunks of decodes cover each row's keys once, within what was reserved."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.decode_chunks import (
    MIN_CHUNK,
    WHOLE_KEYS,
    cut_rows,
    leaves_whole,
    max_chunks,
    whole_rows,
)

lengths = st.lists(st.integers(1, 40_000), max_size=40)


@given(lengths, st.integers(0, 20), st.integers(0, 600), st.sampled_from([None, 128, 4096]))
def test_chunks_cover_the_keys_once(lens: list[int], empty: int, programs: int, window: int | None):
    rows = len(lens) + empty
    most = max_chunks(rows, programs)
    found = cut_rows(np.array(lens, np.int32), window, rows, most)
    assert [len(array) for array in found.arrays] == [most] * 3 + [rows + 1]
    assert all(array.dtype == np.int32 for array in found.arrays)
    for row, length in enumerate([*lens, *[0] * empty]):
        chunks = range(found.starts[row], found.starts[row + 1])
        assert chunks and (found.seqs[chunks.start : chunks.stop] == row).all()
        at = length if window is None else min(length, window)
        at = length - at
        for chunk in chunks:
            assert found.firsts[chunk] == at
            at = found.ends[chunk]
            assert found.ends[chunk] - found.firsts[chunk] >= min(MIN_CHUNK, length) or at == length
        assert at == length
    assert (found.seqs[found.starts[-1] :] == -1).all()


@given(lengths, st.integers(0, 20))
def test_whole_rows_have_one_chunk(lens: list[int], empty: int):
    found = whole_rows(np.array(lens, np.int32), 128, len(lens) + empty)
    assert found.ends.tolist() == [*lens, *[0] * empty]
    assert found.firsts.tolist() == [max(0, length - 128) for length in found.ends.tolist()]


def test_uneven_rows_are_cut_and_even_rows_are_not():
    most = max_chunks(32, 66)
    assert leaves_whole(np.full(32, 640), 32, most)
    assert not leaves_whole(np.array([32_768, *[640] * 31]), 32, most)
    assert not leaves_whole(np.full(2, 4096), 2, max_chunks(2, 66))
    assert leaves_whole(np.full(1, WHOLE_KEYS), 1, max_chunks(1, 66))
