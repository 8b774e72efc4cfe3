"""Gated delta nets on CPU against the recurrence over single tokens in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backends.select import probe
from kernels.interface.registry import LINEAR_ATTENTION, backend_class
from kernels.linear_attention.base import LinearAttention
from kernels.linear_attention.chunks import MAX_CHUNK, Chunks
from kernels.linear_attention.torch_chunked import TorchLinearAttention
from tests.draft_steps import DraftSteps, in_ubatches
from tests.linear_case import BATCHES, SPECS, LinearCase, check

UNAVAILABLE = probe("cpu")
ON_CPU = [
    pytest.param(
        backend_class("linear_attention", name),
        marks=pytest.mark.skipif(reason is not None, reason=str(reason)),
        id=name,
    )
    for name in LINEAR_ATTENTION
    if "cpu" in backend_class("linear_attention", name).devices
    for reason in [UNAVAILABLE.get(f"linear_attention.{name}")]
]
backends = pytest.mark.parametrize("backend", ON_CPU)


@backends
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(backend: type[LinearAttention], batch: str):
    check(backend, [SPECS["two_value_heads"]], BATCHES[batch])


@backends
@pytest.mark.parametrize("spec", SPECS)
def test_shapes_of_heads_and_convolutions(backend: type[LinearAttention], spec: str):
    check(backend, [SPECS[spec]], BATCHES["mixed"])


@backends
def test_layers_of_different_shapes_and_no_padding(backend: type[LinearAttention]):
    check(backend, list(SPECS.values()), BATCHES["mixed"], padding=0)


@pytest.mark.parametrize("batch", ["decodes", "mixed"])
def test_bfloat16(batch: str):
    check(TorchLinearAttention, [SPECS["two_value_heads"]], BATCHES[batch], dtype=torch.bfloat16)


@backends
@settings(max_examples=25)
@given(
    decodes=st.lists(st.integers(0, 20), max_size=4),
    prompts=st.lists(st.tuples(st.integers(0, 70), st.integers(2, 140)), max_size=3),
    spec=st.sampled_from(sorted(SPECS)),
    seed=st.integers(0, 2**31),
)
def test_random_batches(
    backend: type[LinearAttention],
    decodes: list[int],
    prompts: list[tuple[int, int]],
    spec: str,
    seed: int,
):
    seqs = [*((context, 1) for context in decodes), *prompts]
    check(backend, [SPECS[spec]], seqs, seed=seed)


@backends
def test_a_ubatch_continues_a_sequence_that_straddles_the_cut(backend: type[LinearAttention]):
    case = LinearCase([SPECS["two_value_heads"]], [(3, 1), (0, 90), (5, 4)], padding=2)
    batch, (mixed, a, b) = case.batch(), case.rows(0)
    weights, outs = case.layers[0].weights("cpu"), []
    for start, end in ((0, 1), (1, 30), (30, 31), (31, 94), (94, 97)):
        subject = backend(case.specs)
        subject.bind(case.states)
        subject.plan(batch.ubatch(start, end))
        rows = slice(start, end)
        outs.append(subject(mixed[rows], a[rows], b[rows], 0, *weights))
    case.check(0, torch.cat(outs))


@backends
def test_warm_up_without_slots_uses_the_null_slot(backend: type[LinearAttention]):
    case = LinearCase([SPECS["two_value_heads"]], [(0, 1), (0, 5)])
    subject = backend(case.specs)
    subject.bind(case.states)
    subject.plan(replace(case.batch(), state_slots=None))
    case.run(subject, 0)
    assert case.states[0].state[1:].isnan().all() and case.states[0].conv[1:].isnan().all()


@backends
@pytest.mark.parametrize("new", [1, 70])
@torch.inference_mode()
def test_states_in_bfloat16_are_rounded_to_nearest(backend: type[LinearAttention], new: int):
    """One forward from equal states leaves the state in float32, rounded; outputs come from the state before that."""
    spec, outs, states = SPECS["bfloat16_states"], [], []
    for dtype in ("float32", "bfloat16"):
        case = LinearCase([replace(spec, state_dtype=dtype)], [(9, new), (0, new)], seed=4)
        (pool,) = case.states
        pool.state.copy_(pool.state.bfloat16())
        subject = backend(case.specs)
        subject.bind(case.states)
        subject.plan(case.batch())
        outs.append(case.run(subject, 0))
        states.append(pool.state[case.slots])
    assert torch.equal(*outs) and torch.equal(states[0].bfloat16(), states[1])


def test_slots_are_copied_in_all_layers():
    specs = [SPECS["equal_heads"], SPECS["no_conv"], SPECS["conv_of_two"]]
    subject = TorchLinearAttention(specs)
    subject.copy_slots([1], [2])  # without states there is nothing to copy
    states = subject.allocate(specs, 5, torch.bfloat16, torch.device("cpu"))
    subject.bind(states)
    for pool in states:
        pool.conv.normal_()
        pool.state.normal_()
    before = [(pool.conv.clone(), pool.state.clone()) for pool in states]
    subject.copy_slots([1, 3], [4, 2])
    source = [0, 1, 3, 3, 1]
    for pool, (conv, state) in zip(states, before, strict=True):
        assert torch.equal(pool.conv, conv[source]) and torch.equal(pool.state, state[source])
    subject.copy_slots([], [])


def test_bytes_of_a_slot():
    specs = [SPECS["two_value_heads"], SPECS["four_value_heads"], SPECS["bfloat16_states"]]
    for dtype in (torch.float32, torch.bfloat16):
        pools = TorchLinearAttention.allocate(specs, 1, dtype, torch.device("cpu"))
        taken = sum(pool.conv.nbytes + pool.state.nbytes for pool in pools)
        assert TorchLinearAttention.slot_bytes(specs, dtype) == taken


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_chunks_hold_each_token_once(lengths: list[int]):
    chunks = Chunks.cut(np.array(lengths))
    size = chunks.rows.shape[1]
    assert size <= MAX_CHUNK and sum(chunks.steps) == len(chunks.rows)
    assert sorted(chunks.rows[chunks.real]) == list(range(sum(lengths)))
    flat = chunks.rows.reshape(-1)
    assert (flat[chunks.places] == np.arange(sum(lengths))).all()
    first = 0
    for step, count in enumerate(chunks.steps):
        for prompt, rows in zip(chunks.order[:count], chunks.rows[first:], strict=False):
            start = sum(lengths[:prompt]) + step * size
            assert rows[0] == start and step * size < lengths[prompt]
        first += count


def test_the_gates_of_a_head_that_forgets_all_stay_finite():
    case = LinearCase([SPECS["equal_heads"]], [(0, 130), (3, 66)])
    case.layers[0].neg_exp_a = torch.tensor([-1e4, -50.0])
    subject = TorchLinearAttention(case.specs)
    subject.bind(case.states)
    subject.plan(case.batch())
    assert case.run(subject, 0).isfinite().all()
    assert math.isfinite(float(case.states[0].state[case.slots].sum()))


@backends
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=4),
    num_drafts=st.integers(1, 5),
    spec=st.sampled_from(sorted(SPECS)),
    cuts=st.lists(st.integers(1, 12), max_size=2),
    seed=st.integers(0, 2**31),
)
def test_states_behind_accepted_drafts_are_those_of_single_tokens(
    backend: type[LinearAttention],
    lengths: list[int],
    num_drafts: int,
    spec: str,
    cuts: list[int],
    seed: int,
):
    """Steps of prompts, decodes and drafts, whole and in ubatches; slots that had other sequences before."""
    forward = in_ubatches(cuts)
    steps = DraftSteps(backend, SPECS[spec], lengths, num_drafts, seed=seed, forward=forward)
    steps.finish(np.random.default_rng(seed))


def test_the_slot_of_a_restored_prefix_has_no_accepted_drafts():
    spec = replace(SPECS["equal_heads"], num_drafts=2)
    subject = TorchLinearAttention([spec])
    states = subject.allocate([spec], 6, torch.float32, torch.device("cpu"), num_rows=4)
    subject.bind(states)
    subject.accept(torch.tensor([1, 2, 3]), torch.tensor([2, 1, 2]))
    subject.copy_slots([5], [3])
    subject.copy_slots([2], [4])
    assert states[0].accepted.tolist() == [0, 2, 1, 0]
    subject.accept(torch.tensor([1]))
    assert states[0].accepted.tolist() == [0, 0, 1, 0]
