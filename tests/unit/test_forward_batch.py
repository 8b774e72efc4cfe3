"""A forward's batch holds what the table holds of its sequences; a field is declared once and filled by its name."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.batch import Shape
from kernels.host.host_copy import HostCopies
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.schedulers import group_of
from workers.config import SchedulerConfig
from workers.kv_cache.block_groups import FullGroup
from workers.kv_cache.manager import KVCacheManager
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.runner.batch_builder import OPTIONAL, ForwardBatchBuilder, _Staging
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch, ScheduledSequence, Sequence
from workers.wire.request import EngineRequest, SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, MAX_LEN = 4, 6, 64, 40


Rows = tuple[InputBatch, KVCacheManager]


def scheduled(parts: list[tuple[int, int, int]]) -> tuple[Rows, ScheduledBatch]:
    """Sequences of (computed, new, how many of the new rows give logits)."""
    table, seqs = InputBatch(MAX_SEQS, MAX_LEN), []
    sizes = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    cache = KVCacheManager(SchedulerConfig(max_num_seqs=MAX_SEQS), **sizes, prefix_caching=False)
    for index, (computed, new, _) in enumerate(parts):
        total = computed + new
        request = EngineRequest(
            request_id=str(index),
            ingress_id="",
            prompt_token_ids=[100 * index + at for at in range(total)],
            params=SamplingParams(max_tokens=1),
        )
        seq = Sequence.from_request(request, MAX_LEN)
        table.add(seq)
        cache.allocate(seq, cache.lookup(seq), new)
        seq.num_computed_tokens = table.num_computed_tokens[seq.row] = computed
        seqs.append(seq)
    work = zip(seqs, parts, strict=True)
    return (table, cache), ScheduledBatch.of(
        [ScheduledSequence(seq, seq.kind, new, draws) for seq, (_, new, draws) in work]
    )


def builder_of(rows: Rows, **options: Any) -> ForwardBatchBuilder:
    return ForwardBatchBuilder(*rows, MAX_TOKENS, MAX_SEQS, CPU, **options)


@pytest.mark.parametrize(
    ("parts", "found"),
    [([(5, 1, 1), (9, 1, 1), (4, 3, 3)], True), ([(5, 1, 1), (4, 3, 3)], False), ([], False)],
)
def test_shared_prefixes_are_looked_for_where_several_sequences_have_one_row(parts, found: bool):
    rows, batch = scheduled(parts)
    built = builder_of(rows, shares=True).build(batch, 8)
    assert (built.prefix_groups_cpu is not None) == (built.prefix_blocks_cpu is not None) == found
    assert builder_of(rows).build(batch, 8).prefix_groups_cpu is None


part = st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(0, 10))
parts = st.lists(part.map(lambda of: (*of[:2], min(of[1:]))), max_size=MAX_SEQS)


@given(parts, st.integers(0, 4))
def test_a_batch_holds_what_the_table_holds(found, padding):
    rows, step = scheduled(found)
    held = group_of(rows[1], FullGroup).held
    found = sorted(found, key=lambda part: part[1] != 1)
    num_rows = max(1, step.num_tokens + padding)
    batch = builder_of(rows).build(step, num_rows)
    ids, positions, slots, ends = [], [], [], []
    for seq, (computed, new, _) in zip(step.seqs, found, strict=True):
        for at in range(computed, computed + new):
            ids.append(seq.token_ids[at])
            positions.append(at)
            slots.append(held[seq].ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        ends.append(len(ids))
    pad = [0] * (num_rows - len(ids))
    assert batch.num_rows == num_rows and batch.num_tokens == batch.num_token_non_padded == len(ids)
    assert batch.input_ids.tolist() == ids + pad and batch.positions.tolist() == positions + pad
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_start_loc_cpu.tolist() == [0, *ends]
    assert batch.seq_lens_cpu.tolist() == [computed + new for computed, new, _ in found]
    width = batch.block_table.shape[1]
    for row, seq in zip(batch.block_table.tolist(), step.seqs, strict=True):
        assert row == held[seq].ids + [0] * (width - len(held[seq].ids))
    drawing = [(i, back) for i, (*_, draws) in enumerate(found) for back in range(draws)[::-1]]
    assert batch.logits_indices.tolist() == [ends[i] - 1 - back for i, back in drawing]
    drawing_rows = [step.seqs[i].row for i, _ in drawing]
    assert batch.sampling_rows.tolist() == batch.sampling_rows_cpu.tolist() == drawing_rows
    assert batch.sampling_positions_cpu.tolist() == [sum(found[i][:2]) - b for i, b in drawing]
    new = [count for _, count, _ in found]
    assert batch.num_single_rows == new.count(1)
    several = len(new) - new.count(1)
    mode = batch.forward_mode
    assert mode == step.forward_mode and mode.is_idle() == (not new)
    assert mode.is_decode_or_idle() == (not several) != mode.is_extend_or_mixed()
    assert mode.is_mixed() == bool(several and new.count(1))
    assert mode.is_decode() == bool(new and not several)
    assert mode.is_extend() == bool(several and not new.count(1))


def test_pending_tokens_are_resolved_but_for_a_graph():
    rows, step = scheduled([(3, 1, 1), (5, 1, 1)])
    row = step.seqs[1].row
    rows[0].token_ids[row, 5] = -1 - row
    accepted = AcceptedDrafts(MAX_SEQS, 0, CPU)
    assert accepted.last_tokens is not None
    accepted.last_tokens.copy_(torch.arange(50, 50 + MAX_SEQS))
    builder = builder_of(rows, accepted=accepted)
    expected = [3, 50 + row, 0]
    assert builder.build(step, 3).input_ids.tolist() == expected
    batch = builder.build(step, 3, graph=True)
    assert batch.input_ids.tolist() == [3, -1 - row, 0]
    assert batch.num_token_non_padded.tolist() == [2] and batch.num_tokens == 2
    assert batch.resolved(builder.last_tokens).input_ids.tolist() == expected


def test_sequences_step_back_by_rejected_drafts():
    """By the device, or by the host, which waits for it: the rows of a sequence lie where its last tokens end."""
    rows, step = scheduled([(4, 1, 1), (17, 3, 3), (6, 2, 2)])
    table, cache = rows
    first, second = (seq.row for seq in step.seqs[1:])
    table.num_tokens[[first, second]] = 14, 5  # of the tokens in flight, 3 and 2 may be wrong
    accepted = AcceptedDrafts(MAX_SEQS, 3, CPU)
    accepted.rejected_R[[first, second]] = torch.tensor([3, 0])
    accepted.copy(HostCopies(None))
    builder = builder_of(rows, accepted=accepted)
    expected = {
        "positions": [4, 14, 15, 16, 6, 7, 0, 0],
        "slot_mapping": cache.fields(
            step.rows, step.row_of_token, np.array([4, 14, 15, 16, 6, 7]), 17
        )["slot_mapping"].tolist(),
    }
    for follows in (True, False):
        batch = builder.build(step, 8, graph=True, follows=follows)
        found = {name: getattr(batch, name).tolist() for name in expected}
        assert found == expected, follows
        ids = batch.input_ids.tolist()
        assert ids[0] == 4 and [ids[1], ids[4]] == [-1 - first, -1 - second]
        assert batch.seq_lens_cpu.tolist() == ([5, 20, 8] if follows else [5, 17, 8])
        assert (None if batch.behind is None else batch.behind.tolist()) == (
            [0, 3, 0] if follows else None
        )
    table.num_computed_tokens[step.rows] = 5, 17, 8  # launched, and the step before committed
    batch = builder.settled(step, builder.build(step, 8, graph=True, follows=True))
    assert batch.seq_lens_cpu.tolist() == [5, 17, 8] and batch.behind is None
    assert batch.sampling_positions_cpu.tolist() == [5, 15, 16, 17, 7, 8]


def test_a_graph_finds_its_fields_where_its_capture_did():
    """Tokens and sequences of the step may differ from the capture's, rows do not."""
    builders, addresses = [], []
    for case in ([], [(3, 1, 1)], [(0, 5, 0), (30, 4, 4), (0, 2, 1)]):
        rows, step = scheduled(case)
        builders.append(builder_of(rows))
        batch = builders[-1].build(step, 12, graph=True)
        start = batch.num_token_non_padded.data_ptr()
        addresses.append([getattr(batch, n).data_ptr() - start for n in ("input_ids", "positions")])
    assert addresses[0] == addresses[1] == addresses[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class WiderBatch(ForwardBatch):
    """A forward with two more fields."""

    adapter_ids: Annotated[torch.Tensor, Shape("seq")]
    token_types: Annotated[torch.Tensor, Shape("row")]


def test_a_new_field_is_declared_once():
    most = {"row": 8, "token": 8, "seq": 2, "logits": 2, "block": 3}
    batch = make_batch([[1], [2, 3, 4]], [0, 0])
    values = {
        name: np.asarray(getattr(batch, name))
        for name in ("input_ids", "positions", "logits_indices", "sampling_rows", "slot_mapping")
    }
    values |= {"block_table": batch.block_table[:, :3].numpy()}
    values |= {"num_token_non_padded": np.array([4])}
    values |= {"adapter_ids": np.array([7, 9]), "token_types": np.array([5, 5, 6, 6])}
    on_device = _Staging(WiderBatch, most, CPU, OPTIONAL).ship(6, values)
    assert on_device["token_types"].tolist() == [5, 5, 6, 6, 0, 0]
    others = {f.name: getattr(batch, f.name) for f in fields(batch)}
    wider = WiderBatch(**{**others, **on_device, "num_token_non_padded": 4})
    first, last = wider.ubatch(0, 3), wider.ubatch(3, 6)
    assert first.adapter_ids.tolist() == [7, 9] and last.adapter_ids.tolist() == [9]
    assert first.token_types.tolist() == [5, 5, 6] and last.token_types.tolist() == [6, 0, 0]


@pytest.mark.parametrize("num_tokens", [0, 2, 5])
def test_the_model_counts_tokens_as_a_graph_does(tmp_path: Path, num_tokens: int):
    """Rows behind the count on the device reach no expert, whatever the batch says on the host."""
    rank = OneRank(small_checkpoint(tmp_path))
    seen = []
    all2all = rank.backends.all2all
    dispatch = all2all.dispatch

    def watched(x_TD, topk_idx_TK, topk_weights_TK):
        seen.append((topk_idx_TK[:, 0] >= 0).tolist())
        return dispatch(x_TD, topk_idx_TK, topk_weights_TK)

    all2all.dispatch = watched
    table, step = scheduled([(0, 3, 1)])
    batch = builder_of(table).build(step, 5, graph=True)
    batch.num_token_non_padded.fill_(num_tokens)
    with torch.inference_mode():
        rank.attention.plan(batch)
        rank.model.forward(batch)
    assert seen == [[row < num_tokens for row in range(5)]] * len(rank.model.layers)
