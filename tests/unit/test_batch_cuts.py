"""Slices of a batch hold each token once, with the context that it had in the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model_case import BLOCK_SIZE, Batch, make_batch
from workers.ubatch.batch_cuts import RowSlice, cut, cut_rows

Facts = tuple[int, int, int, list[int]]


def facts(batch, rows) -> list[Facts]:
    """Of each real token: id, position (of `rows`), tokens of its sequence up to it, the sequence's blocks."""
    found = []
    starts, lens = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
    assert starts[0] == 0 and starts[-1] == batch.num_tokens and len(starts) == batch.num_seqs + 1
    for seq, (start, end) in enumerate(pairwise(starts)):
        assert end > start, "a sequence without tokens"
        for row in range(start, end):
            upto = lens[seq] - (end - 1 - row)
            found.append(
                (
                    int(rows.input_ids[row]),
                    int(rows.positions[row]),
                    upto,
                    batch.block_table[seq].tolist(),
                )
            )
    return found


def check(batch: Batch, num_ubatches: int) -> None:
    slices, rows = cut(batch, len(batch.input_ids), num_ubatches), cut_rows(batch, num_ubatches)
    assert [part.start for part in slices] == [0, *(part.end for part in slices)][:-1]
    assert slices[-1].end == len(batch.input_ids)
    sizes = [part.end - part.start for part in slices]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    found = [fact for pair in zip(slices, rows, strict=True) for fact in facts(*pair)]
    assert found == facts(batch, batch)
    assert sum(part.num_tokens for part in slices) == batch.num_tokens
    slots = torch.cat([part.slot_mapping for part in slices])
    assert torch.equal(slots, batch.slot_mapping)
    for part, own in zip(slices, rows, strict=True):
        assert len(own.input_ids) == len(own.positions) == part.end - part.start
        assert own.num_tokens == part.num_tokens
        assert part.seq_lens_cpu.dtype == part.query_start_loc_cpu.dtype == np.int32
        new_tokens = np.diff(part.query_start_loc_cpu)
        assert (new_tokens[: part.num_decodes] == 1).all()
        # padding comes last, so a slice behind one with padding has nothing else
        assert part.num_tokens in (min(part.end, batch.num_tokens) - part.start, 0)
    assert sum(part.num_decodes for part in slices) == batch.num_decodes


sequences = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=0, max_size=6)


@given(sequences, st.integers(0, 12), st.integers(1, 5))
def test_every_token_keeps_its_context(lengths, padding, num_ubatches):
    lengths = sorted(lengths, key=lambda pair: pair[0] != 1)
    ids = [[100 * i + j for j in range(new)] for i, (new, _) in enumerate(lengths)]
    total = sum(map(len, ids))
    padding = max(padding, num_ubatches - total)
    batch = make_batch(ids, [context for _, context in lengths], padding)
    check(batch, num_ubatches)


def test_a_request_over_three_slices():
    batch = make_batch([[1], list(range(10, 21))], [5, 3])
    first, middle, last = cut(batch, 12, 3)
    assert [p.num_seqs for p in (first, middle, last)] == [2, 1, 1]
    assert [p.num_decodes for p in (first, middle, last)] == [1, 0, 0]
    assert first.seq_lens_cpu.tolist() == [6, 6]
    assert middle.seq_lens_cpu.tolist() == [10] and last.seq_lens_cpu.tolist() == [14]
    assert last.query_start_loc_cpu.tolist() == [0, 4]
    assert cut_rows(batch, 3)[2].positions.tolist() == [10, 11, 12, 13]


def test_a_tail_of_one_token_is_no_decode():
    batch = make_batch([[1, 2, 3], [4, 5]], [0, 0], padding=1)
    last = cut(batch, 6, 3)[2]
    assert last.num_tokens == 1 and last.num_seqs == 1 and last.num_decodes == 0


def test_an_idle_rank_has_slices_of_padding():
    for part in cut(make_batch([], [], padding=5), 5, 2):
        assert part.num_tokens == part.num_seqs == part.num_decodes == 0
        assert part.end - part.start in (2, 3) and len(part.slot_mapping) == 0


def test_slices_are_views():
    batch = make_batch([[1, 2, 3, 4]], [BLOCK_SIZE])
    batch.input_ids[3] = 77
    assert cut_rows(batch, 2)[1].input_ids.tolist() == [3, 77]


@pytest.mark.parametrize(
    ("num_tokens", "of_slices"), [(4, [3, 1, 0]), (0, [0, 0, 0]), (9, [3, 3, 3])]
)
def test_a_graph_counts_the_tokens_of_a_slice_on_the_device(num_tokens, of_slices):
    batch = make_batch([list(range(4))], [0], padding=5)
    graph = RowSlice(torch.tensor([num_tokens]), batch.input_ids, batch.positions)
    assert [part.num_tokens.tolist() for part in cut_rows(graph, 3)] == [[n] for n in of_slices]
    assert graph.num_tokens.tolist() == [num_tokens]


def test_too_few_rows_are_refused():
    with pytest.raises(AssertionError, match="1 rows cannot be cut into 2"):
        cut(make_batch([[1]], [0]), 1, 2)
