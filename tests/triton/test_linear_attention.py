"""Gated delta nets in Triton against the recurrence over single tokens in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention import prompt_table
from kernels.linear_attention.triton_delta import TritonLinearAttention
from tests.closeness import calc_diff
from tests.draft_steps import DraftSteps, eager, in_ubatches
from tests.linear_case import BATCHES, SPECS, LinearCase, check, recurrence
from tests.triton.device import COMPILED, DEVICE, compiled_only

SMALL = LinearAttentionSpec(1, 2, 16, 16, 4)
REAL = LinearAttentionSpec(16, 32, 128, 128, 4)  # of Qwen3.6-35B-A3B
# Batches of few programs: the interpreter takes a second for some ten.
SHORT = ["nothing", "decodes", "first_tokens", "new_prompt", "short_prompts"]
# Products of prompts have operands of 16 bits, keys and queries too.
PRODUCTS = {torch.float32: None, torch.float16: 2e-6, torch.bfloat16: 1e-4}
# Shape of heads, dtype of the hidden states, rows at which ubatches are cut.
DRAFTED = [
    ("two_value_heads", torch.float32, [2, 5]),
    ("conv_of_two", torch.float16, []),
    *compiled_only(
        *((spec, torch.bfloat16, cuts) for spec in sorted(SPECS) for cuts in ([], [3], [2, 5]))
    ),
]
DTYPES = [torch.float32, torch.float16, *compiled_only(torch.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [*SHORT, *compiled_only(*sorted(BATCHES.keys() - {*SHORT}))])
@torch.inference_mode()
def test_batches(batch: str, dtype: torch.dtype):
    check(
        TritonLinearAttention, [SMALL], BATCHES[batch], PRODUCTS[dtype], dtype=dtype, device=DEVICE
    )


@torch.inference_mode()
def test_borders_of_chunks():
    check(TritonLinearAttention, [SMALL], [(1, 1), (0, 64), (64, 65), (2, 63)], device=DEVICE)


@pytest.mark.parametrize("spec", SPECS)
@torch.inference_mode()
def test_shapes_of_heads_and_convolutions(spec: str):
    seqs = [(3, 1), (0, 1), (0, 17), (5, 2)]
    dtype = torch.bfloat16 if COMPILED else torch.float32  # kernels of float32 compile for long
    check(TritonLinearAttention, [SPECS[spec]], seqs, PRODUCTS[dtype], dtype=dtype, device=DEVICE)


if COMPILED:  # too large for the interpreter

    @pytest.mark.parametrize("batch", ["decodes", "mixed", "borders"])
    @torch.inference_mode()
    def test_real_heads(batch: str):
        dtype = torch.bfloat16
        seqs, limit = BATCHES[batch], PRODUCTS[dtype]
        check(TritonLinearAttention, [REAL], seqs, limit, dtype=dtype, device=DEVICE)

    @torch.inference_mode()
    def test_decodes_round_only_their_outputs():
        """States of decodes stay float32, whatever the dtype of the hidden states."""
        seqs = [(300, 1), (0, 1)]
        check(TritonLinearAttention, [REAL], seqs, dtype=torch.bfloat16, device=DEVICE)


@torch.inference_mode()
def test_a_ubatch_continues_a_sequence_that_straddles_the_cut():
    case = LinearCase([SMALL], [(3, 1), (0, 90), (5, 4)], padding=2, device=DEVICE)
    batch, (mixed, a, b) = case.batch(), case.rows(0)
    weights, outs = case.layers[0].weights(DEVICE), []
    for start, end in ((0, 1), (1, 30), (30, 31), (31, 94), (94, 97)):
        subject = TritonLinearAttention(case.specs)
        subject.bind(case.states)
        subject.plan(batch.ubatch(start, end))
        rows = slice(start, end)
        outs.append(subject(mixed[rows], a[rows], b[rows], 0, *weights))
    case.check(0, torch.cat(outs))


@torch.inference_mode()
def test_steps_of_fixed_rows_leave_the_slots_of_padding_alone():
    """As graphs are replayed: rows behind the sequences return zeros and write no slot, the null slot neither."""
    case = LinearCase([SPECS["two_value_heads"]], [(4, 1), (0, 1)], padding=3, device=DEVICE)
    subject = TritonLinearAttention(case.specs)
    subject.bind(case.states)
    subject.reserve_graphs(8, 8)
    idle = replace(case.batch(), num_tokens=0, num_seqs=0, num_single_rows=0)
    starts, lens = idle.query_start_loc_cpu[:1], idle.seq_lens_cpu[:0]
    assert idle.state_slots is not None
    idle = replace(
        idle, query_start_loc_cpu=starts, seq_lens_cpu=lens, state_slots=idle.state_slots[:0]
    )
    subject.plan_graph(idle, 5, prompts=False)
    states = [pool.state.clone() for pool in case.states]
    assert not case.run(subject, 0).any()
    assert torch.equal(case.states[0].state.nan_to_num(-1), states[0].nan_to_num(-1))
    subject.plan_graph(case.batch(), 5, prompts=False)
    case.check(0, case.run(subject, 0))
    states = [pool.state.clone() for pool in case.states]
    subject.plan_graph(idle, 5, prompts=False)  # without the sequences of the step before
    assert not case.run(subject, 0).any()
    assert torch.equal(case.states[0].state.nan_to_num(-1), states[0].nan_to_num(-1))


@torch.inference_mode()
def test_a_larger_graph_behind_a_smaller_one_has_no_slots_of_graphs_before():
    """Padding rows with the slot of a sequence would advance its state by rows of nobody."""
    case = LinearCase([SMALL], [(3, 1)] * 7, device=DEVICE)
    subject = TritonLinearAttention(case.specs)
    subject.bind(case.states)
    subject.reserve_graphs(8, 8)
    batch = case.batch()
    assert batch.state_slots is not None
    for num_seqs, num_rows in ((7, 8), (2, 2), (3, 8)):
        few = replace(
            batch,
            num_tokens=num_seqs,
            num_seqs=num_seqs,
            num_single_rows=num_seqs,
            query_start_loc_cpu=batch.query_start_loc_cpu[: num_seqs + 1],
            seq_lens_cpu=batch.seq_lens_cpu[:num_seqs],
            state_slots=batch.state_slots[:num_seqs],
        )
        subject.plan_graph(few, num_rows, prompts=False)
        slots = subject._decodes.slots
        assert len(slots) == num_rows and slots[:num_seqs].all() and not slots[num_seqs:].any()


@pytest.mark.parametrize("seqs", [[(4, 1), (0, 1), (3, 5), (0, 66)], [(0, 70)], [(2, 1)], []])
@torch.inference_mode()
def test_steps_of_fixed_rows_with_prompts(seqs: list[tuple[int, int]]):
    """All have the launch shapes of one graph; the last sequence fits, and any further one would too."""
    rows = 76
    case = LinearCase([SMALL], seqs, padding=rows - sum(new for _, new in seqs), device=DEVICE)
    subject = TritonLinearAttention(case.specs)
    subject.bind(case.states)
    subject.reserve_graphs(rows, 5)
    subject.plan_graph(case.batch(), rows, prompts=True)
    table = subject._table
    assert table is not None and (table.chunk_programs, table.prompt_programs) == (6, 5)
    case.check(0, case.run(subject, 0))


@torch.inference_mode()
def test_programs_share_more_chunks_and_prompts_than_there_are_programs(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(prompt_table, "MAX_CHUNK_PROGRAMS", 1)
    monkeypatch.setattr(prompt_table, "MAX_PROMPT_PROGRAMS", 2)
    case = LinearCase([SMALL], [(3, 1), (0, 2), (4, 3), (0, 66), (1, 2)], device=DEVICE)
    subject = TritonLinearAttention(case.specs)
    subject.bind(case.states)
    subject.reserve_graphs(77, 6)
    subject.plan_graph(case.batch(), 77, prompts=True)
    table = subject._table
    assert table is not None and (table.chunk_programs, table.prompt_programs) == (2, 2)
    case.check(0, case.run(subject, 0))


@pytest.mark.parametrize("seqs", [[(3, 1), (0, 7), (5, 66)], [(0, 70)]])
@torch.inference_mode()
def test_rows_that_nothing_wrote_are_not_read(seqs: list[tuple[int, int]]):
    """Chunks are read whole; of a last chunk, only rows that were written."""
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        check(TritonLinearAttention, [SMALL], seqs, device=DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)


@torch.inference_mode()
def test_a_prompt_with_nan_leaves_the_others_as_they_are():
    """The last chunk of the first prompt reads rows of the second one, of which nothing may be left."""
    case, outs = LinearCase([SMALL], [(0, 5), (0, 7)], device=DEVICE), []
    rows, weights = case.rows(0), case.layers[0].weights(DEVICE)
    for spoiled in (False, True):
        if spoiled:
            for tensor in rows:
                tensor[5:] = torch.nan
        subject = TritonLinearAttention(case.specs)
        subject.bind(case.states)
        subject.plan(case.batch())
        outs.append((subject(*rows, 0, *weights)[:5], case.states[0].state[case.slots[0]].clone()))
    for found, expected in zip(*outs, strict=True):
        assert torch.equal(found, expected) and found.isfinite().all()


@torch.inference_mode()
def test_a_copied_slot_continues_the_prompt_and_the_copy_stays():
    """As snapshots of prefixes do: slots are copied at ends of blocks, which may be ends of chunks."""
    case = LinearCase([SMALL], [(0, 100)], device=DEVICE)
    subject, slot = TritonLinearAttention(case.specs), int(case.slots[0])
    subject.bind(case.states)
    (mixed, a, b), weights = case.rows(0), case.layers[0].weights(DEVICE)
    outs, snapshot = [], 1 if slot != 1 else 2
    for start, end in ((0, 64), (64, 103)):
        subject.plan(case.batch().ubatch(start, end))
        rows = slice(start, end)
        outs.append(subject(mixed[rows], a[rows], b[rows], 0, *weights))
        if start == 0:
            subject.copy_slots([slot], [snapshot])
    pool = case.states[0]
    _, expected, _ = recurrence(SMALL, case.layers[0], 0, 64)
    assert calc_diff(pool.state[snapshot].cpu(), expected) < 1e-10
    pool.state[snapshot], pool.conv[snapshot] = torch.nan, torch.nan
    case.check(0, torch.cat(outs))


@torch.inference_mode()
def test_warm_up_without_slots_writes_no_slot():
    case = LinearCase([SPECS["two_value_heads"]], [(0, 1), (0, 5)], device=DEVICE)
    subject = TritonLinearAttention(case.specs)
    subject.bind(case.states)
    subject.plan(replace(case.batch(), state_slots=None))
    assert case.run(subject, 0).isfinite().all()
    assert case.states[0].state.isnan().all() and case.states[0].conv.isnan().all()


@torch.inference_mode()
def test_equal_keys_without_decay():
    """The worst systems: each token's value depends on all before it with a weight near 1."""
    case = LinearCase([SMALL], [(0, 130)], device=DEVICE)
    layer = case.layers[0]
    layer.mixed[0][:, : 2 * case.specs[0].key_size] = 1.0
    layer.conv_weight.fill_(1.0)
    layer.neg_exp_a.fill_(-1e-6)
    layer.b[0].fill_(6.0)
    case.expect()
    subject = TritonLinearAttention(case.specs)
    subject.bind(case.states)
    subject.plan(case.batch())
    case.check(0, case.run(subject, 0), 1e-5 if COMPILED else 1e-8)


@pytest.mark.parametrize(("spec", "dtype", "cuts"), DRAFTED)
@torch.inference_mode()
def test_states_behind_accepted_drafts_are_those_of_single_tokens(
    spec: str, dtype: torch.dtype, cuts: list[int]
):
    """Steps of prompts, decodes and drafts, whole and in ubatches; slots that had other sequences before."""
    steps = DraftSteps(
        *(TritonLinearAttention, SPECS[spec], [14, 2, 9], 3),
        dtype=dtype,
        device=DEVICE,
        forward=in_ubatches(cuts),
        tolerance=PRODUCTS[dtype],
    )
    steps.finish(np.random.default_rng(3))


@pytest.mark.parametrize("prompts", [False, True])
@torch.inference_mode()
def test_steps_of_fixed_rows_with_drafts(prompts: bool):
    """As graphs are replayed: launches and addresses of all steps are those of the first, rows of padding get zeros."""
    rows, seqs, met = 14, 4, set()

    def fixed(subject, batch, inputs, weights):
        if prompts or batch.num_prompts == 0:
            padded = [torch.cat((x, x.new_ones(rows - len(x), x.shape[1]))) for x in inputs]
            subject.plan_graph(batch, rows, prompts=prompts, drafts=True)
            table = subject._decodes
            met.add((len(table.slots), table.starts.data_ptr(), table.most_rows, table.num_rows))
            out = subject(*padded, 0, *weights)
            assert not out[batch.num_tokens :].any()
            return out[: len(inputs[0])]
        return eager(subject, batch, inputs, weights)

    steps = DraftSteps(
        *(TritonLinearAttention, SMALL, [9, 5, 7], 2), device=DEVICE, forward=fixed, padding=0
    )
    steps.subject.reserve_graphs(rows, seqs)
    steps.finish(np.random.default_rng(5))
    assert len(met) == 1
