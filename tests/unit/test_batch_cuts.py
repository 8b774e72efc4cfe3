"""Ubatches of a batch hold each token once, with the context that it had in the whole."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.batch import AttentionBatch
from tests.unit.model_case import BLOCK_SIZE, make_batch
from workers.step.forward_batch import ForwardBatch
from workers.ubatch.batch_cuts import cut, ubatch_rows

Facts = tuple[int, int, int, list[int]]


def facts(batch: ForwardBatch) -> list[Facts]:
    """Of each real token: id, position, tokens of its sequence up to it, the sequence's blocks."""
    found = []
    starts, lens = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
    assert starts[0] == 0 and starts[-1] == batch.num_tokens and len(starts) == batch.num_seqs + 1
    for seq, (start, end) in enumerate(pairwise(starts)):
        assert end > start, "a sequence without tokens"
        for row in range(start, end):
            upto = lens[seq] - (end - 1 - row)
            found.append(
                (
                    int(batch.input_ids[row]),
                    int(batch.positions[row]),
                    upto,
                    batch.block_table[seq].tolist(),
                )
            )
    return found


def check(batch: ForwardBatch, num_ubatches: int) -> None:
    parts, rows = (
        cut(batch, batch.num_rows, num_ubatches),
        ubatch_rows(batch.num_rows, num_ubatches),
    )
    assert [start for start, _ in rows] == [0, *(end for _, end in rows)][:-1]
    assert rows[-1][1] == batch.num_rows
    sizes = [end - start for start, end in rows]
    assert [part.num_rows for part in parts] == [len(part.positions) for part in parts] == sizes
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    assert [fact for part in parts for fact in facts(part)] == facts(batch)
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    slots = torch.cat([part.slot_mapping for part in parts])
    assert torch.equal(slots, batch.slot_mapping)
    for part, (start, end) in zip(parts, rows, strict=True):
        assert part.num_token_non_padded == part.num_tokens
        assert part.seq_lens_cpu.dtype == part.query_start_loc_cpu.dtype == np.int32
        new_tokens = np.diff(part.query_start_loc_cpu)
        assert (new_tokens[: part.num_single_rows] == 1).all()
        # padding comes last, so a ubatch behind one with padding has nothing else
        assert part.num_tokens in (min(end, batch.num_tokens) - start, 0)
        assert len(part.logits_indices) == len(part.sampling_rows_cpu) == 0, "the whole samples"
    assert sum(part.num_single_rows for part in parts) == batch.num_single_rows


sequences = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=0, max_size=6)


@given(sequences, st.integers(0, 12), st.integers(1, 5))
def test_every_token_keeps_its_context(lengths, padding, num_ubatches):
    lengths = sorted(lengths, key=lambda pair: pair[0] != 1)
    ids = [[100 * i + j for j in range(new)] for i, (new, _) in enumerate(lengths)]
    total = sum(map(len, ids))
    padding = max(padding, num_ubatches - total)
    batch = make_batch(ids, [context for _, context in lengths], padding)
    check(batch, num_ubatches)


def test_a_request_over_three_ubatches():
    batch = make_batch([[1], list(range(10, 21))], [5, 3])
    first, middle, last = cut(batch, 12, 3)
    assert [p.num_seqs for p in (first, middle, last)] == [2, 1, 1]
    assert [p.num_single_rows for p in (first, middle, last)] == [1, 0, 0]
    assert first.seq_lens_cpu.tolist() == [6, 6]
    assert middle.seq_lens_cpu.tolist() == [10] and last.seq_lens_cpu.tolist() == [14]
    assert last.query_start_loc_cpu.tolist() == [0, 4]
    assert last.positions.tolist() == [10, 11, 12, 13]


def test_a_tail_of_one_token_is_no_decode():
    batch = make_batch([[1, 2, 3], [4, 5]], [0, 0], padding=1)
    last = cut(batch, 6, 3)[2]
    assert last.num_tokens == 1 and last.num_seqs == 1 and last.num_single_rows == 0


@given(
    st.integers(0, 3),
    st.lists(st.integers(2, 6), max_size=4),
    st.lists(st.integers(2, 9), max_size=2),
    st.integers(1, 5),
)
def test_drafts_know_their_place_behind_the_rows_of_earlier_ubatches(
    singles, verify, prompts, num_ubatches
):
    """Each row of a sequence with drafts once, at its place; all others are no drafts."""
    lengths = [1] * singles + verify + prompts
    batch = make_batch([[0] * n for n in lengths], [9] * len(lengths), padding=num_ubatches)
    batch = replace(batch, num_verify=len(verify))
    places: list[tuple[int, int]] = []
    for part in cut(batch, batch.num_rows, num_ubatches):
        assert part.num_decodes + part.num_prompts == part.num_seqs
        slots = part.state_slots.tolist()
        for seq in range(part.num_single_rows, part.num_decodes):
            start, end = part.query_start_loc_cpu[seq : seq + 2].tolist()
            before = part.rows_before if seq == 0 else 0
            places += [(slots[seq], before + row) for row in range(end - start)]
        assert part.rows_before == 0 or part.num_single_rows == 0 < part.num_verify
    assert places == [
        (singles + seq + 1, place) for seq, count in enumerate(verify) for place in range(count)
    ]


def test_an_idle_rank_has_ubatches_of_padding():
    for part in cut(make_batch([], [], padding=5), 5, 2):
        assert part.num_tokens == part.num_seqs == part.num_single_rows == 0
        assert part.num_rows in (2, 3) and len(part.slot_mapping) == 0


def test_a_ubatch_is_a_view_of_the_same_type():
    batch = make_batch([[1, 2, 3, 4]], [BLOCK_SIZE])
    last = cut(batch, 4, 2)[1]
    assert type(last) is ForwardBatch
    batch.input_ids[3] = 77
    assert last.input_ids.tolist() == [3, 77]
    assert batch.query_start_loc_cpu.tolist() == [0, 4] and batch.seq_lens_cpu.tolist() == [12]


@pytest.mark.parametrize(
    ("num_tokens", "of_ubatches"), [(4, [3, 1, 0]), (0, [0, 0, 0]), (9, [3, 3, 3])]
)
def test_a_graph_counts_the_tokens_of_a_ubatch_on_the_device(num_tokens, of_ubatches):
    batch = make_batch([list(range(4))], [0], padding=5)
    graph = replace(batch, num_token_non_padded=torch.tensor([num_tokens]))
    found = [part.num_token_non_padded for part in cut(graph, 9, 3)]
    assert [count.tolist() for count in found] == [[n] for n in of_ubatches]
    assert graph.num_token_non_padded.tolist() == [num_tokens]


def test_dummy_decodes_of_a_capture_are_cut_too():
    decodes = AttentionBatch.dummy_decodes(5, torch.device("cpu"))
    first, last = cut(decodes, 8, 2)  # three rows of padding
    assert (first.num_single_rows, last.num_single_rows) == (4, 1)
    for part in (first, last):
        assert part.num_tokens == part.num_seqs == part.num_single_rows
        assert part.seq_lens_cpu.tolist() == [1] * part.num_seqs
        assert part.block_table.tolist() == [[0]] * part.num_seqs
        assert set(part.slot_mapping.tolist()) == {-1}, "K and V must not be written"


def test_too_few_rows_are_refused():
    with pytest.raises(AssertionError, match="1 rows cannot be cut into 2"):
        cut(make_batch([[1]], [0]), 1, 2)
