"""Which graphs there are and what is voted for them; capturing and replaying is tested on GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.attention.base import GraphForm
from kernels.backends.select import Choice, Selection
from tests.unit.test_step_sync import rows, vote
from workers.config import SchedulerConfig
from workers.overlap.epoch_ubatches import ubatch_graphs
from workers.overlap.policy import never
from workers.runner import cuda_graphs
from workers.runner.graph_sizes import (
    GraphKey,
    GraphSizes,
    decode_sizes,
    graphs_to_capture,
    mixed_sizes,
)
from workers.runner.model_runner import ModelRunner
from workers.step.step_sync import ForwardMode, GraphMode, PlanConfig, StepPlan, decide


@pytest.mark.parametrize("max_rows", [*range(1, 70), 96, 100, 128, 200, 256, 500, 512, 1000, 1024])
def test_padding_wastes_little(max_rows):
    sizes = decode_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_rows
    waste = [
        next(size for size in sizes if size >= count) / count - 1
        for count in range(1, max_rows + 1)
    ]
    assert sum(waste) / len(waste) <= 0.12 and max(waste) < 0.25


def test_there_are_not_many():
    assert len(decode_sizes(256)) == 28 and len(decode_sizes(1024)) == 36
    assert mixed_sizes(700) == (16, 32, 64, 128, 256, 512, 640, 700)
    assert mixed_sizes(10) == (10,) and mixed_sizes(16) == (16,) and len(mixed_sizes(8192)) == 22


SIZES = GraphSizes(decode_sizes(20), mixed_sizes(64))


@pytest.mark.parametrize(
    ("mode", "num_tokens", "decode_rows", "mixed_rows"),
    [
        (ForwardMode.IDLE, 0, 1, 16),
        (ForwardMode.DECODE, 8, 8, 16),
        (ForwardMode.DECODE, 9, 10, 16),
        (ForwardMode.DECODE, 21, 0, 32),
        (ForwardMode.MIXED, 4, 0, 16),
        (ForwardMode.EXTEND, 64, 0, 64),
        (ForwardMode.EXTEND, 65, 0, 0),
    ],
)
def test_votes(mode, num_tokens, decode_rows, mixed_rows):
    expected = {"decode_rows": decode_rows, "verify_rows": 0, "mixed_rows": mixed_rows}
    assert SIZES.vote(mode, num_tokens) == expected
    assert not any(GraphSizes().vote(mode, num_tokens).values())


@pytest.mark.parametrize(
    ("sizes", "largest"), [(SIZES, 64), (GraphSizes((1,)), 1), (GraphSizes((1, 2), (1,)), 2)]
)
def test_the_largest_graph(sizes, largest):
    assert sizes.largest == largest


def test_what_equal_ranks_replay():
    assert SIZES.key(ForwardMode.DECODE, 9) == GraphKey(GraphMode.DECODE, 10)
    assert SIZES.key(ForwardMode.EXTEND, 9, True) == GraphKey(GraphMode.MIXED, 16, True)
    assert SIZES.key(ForwardMode.EXTEND, 65) is None


def test_a_rank_with_prompts_takes_all_ranks_to_graphs_that_run_any_step():
    sizes = replace(SIZES, verify=decode_sizes(60))

    def of(mode: ForwardMode, num_tokens: int, prompts: bool = True):
        return vote(num_tokens, **sizes.vote(mode, num_tokens, prompts=prompts))

    def found(*group) -> tuple[GraphMode, int]:
        plan = decide(rows(*group), PlanConfig(equal_tokens=False))
        return plan.graph_mode, plan.padded_tokens

    drafts, decodes = of(ForwardMode.MIXED, 17, False), of(ForwardMode.DECODE, 9)
    idle, prompt = of(ForwardMode.IDLE, 0), of(ForwardMode.EXTEND, 30)
    assert found(drafts, decodes, idle) == (GraphMode.VERIFY, 20)
    assert found(decodes, idle) == (GraphMode.DECODE, 10)
    assert found(drafts, prompt, idle) == (GraphMode.MIXED, 32)


def test_all_ranks_replay_the_size_of_the_busiest_or_none_replays():
    ragged = PlanConfig(equal_tokens=False)

    def of(mode: ForwardMode, num_tokens: int, sizes: GraphSizes = SIZES):
        return vote(num_tokens, **sizes.vote(mode, num_tokens))

    plan = decide(
        rows(of(ForwardMode.DECODE, 5), of(ForwardMode.DECODE, 17), of(ForwardMode.IDLE, 0)), ragged
    )
    assert (plan.graph_mode, plan.padded_tokens) == (GraphMode.DECODE, 20)
    assert plan.num_tokens_across_dp == (5, 17, 0)
    plan = decide(rows(of(ForwardMode.DECODE, 5), of(ForwardMode.EXTEND, 17)), ragged)
    assert (plan.graph_mode, plan.padded_tokens) == (GraphMode.MIXED, 32)
    decodes = GraphSizes(decode_sizes(20))
    group = of(ForwardMode.DECODE, 5, decodes), of(ForwardMode.EXTEND, 17, decodes)
    plan = decide(rows(*group), ragged)
    assert plan.graph_mode == GraphMode.NONE and plan.padded_tokens == 0


def test_what_is_captured():
    can = Selection(Choice("copy_engine", ""), Choice("triton", ""), Choice("flashinfer", ""))
    cuda, cpu, cannot = torch.device("cuda"), torch.device("cpu"), Choice("sdpa", "")

    def sizes(wanted, selection=can, device=cuda, mixed=False):
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 6}
        config = SchedulerConfig(cuda_graphs=wanted, **limits)
        return graphs_to_capture(config, selection, device, mixed=mixed)

    decodes = (1, 2, 3, 4, 5, 6)
    assert sizes("auto") == sizes(True) == GraphSizes(decodes)
    assert sizes("auto", mixed=True) == GraphSizes(decodes, (6,))
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=30, cuda_graphs=True)
    drafts = graphs_to_capture(limits, can, cuda, mixed=True, rows_per_seq=4)
    assert drafts.verify == decode_sizes(30) and drafts.most_logits == 30
    assert graphs_to_capture(limits, can, cuda, mixed=False, rows_per_seq=4).verify == ()
    few = graphs_to_capture(limits, can, cuda, mixed=True, rows_per_seq=4, max_rows=7)
    assert (few.decode, few.mixed, few.verify) == (decode_sizes(7), (7,), decode_sizes(7))
    assert not sizes(False) and not sizes("auto", replace(can, attention=cannot))
    assert not sizes("auto", device=cpu)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 4), GraphSizes((1, 4), (1, 4))),
        ((32, 4, 4), GraphSizes((4, 8), (4, 32))),
        ((64,), GraphSizes((8,), (32,))),
    ],
)
def test_configured_sizes_are_captured_up_to_the_largest_step(sizes, expected):
    can = Selection(Choice("copy_engine", ""), Choice("triton", ""), Choice("flashinfer", ""))
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, cuda_graph_sizes=sizes, cuda_graphs=True
    )
    cuda = torch.device("cuda")
    assert graphs_to_capture(config, can, cuda, mixed=True) == expected
    assert graphs_to_capture(config, can, cuda, mixed=False) == GraphSizes(expected.decode)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch):
    """Graphs whose captures are recorded; attention has two forms, of fewer than 66 rows one."""
    cuda = SimpleNamespace(
        empty_cache=lambda: None,
        synchronize=lambda device: None,
        memory_reserved=lambda device: 0,
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    graphs = object.__new__(cuda_graphs.StepGraphs)
    graphs._graphs, graphs._model = {}, SimpleNamespace(device="cuda")
    graphs._postponed, graphs._ran_forms, graphs.on_demand = set(), set(), False
    graphs._whole = graphs._ubatches = SimpleNamespace(
        forms=lambda rows, prompts: tuple(
            GraphForm(2 * prompts + form) for form in range(rows < 66, 2)
        )
    )
    order: list[tuple[object, ...]] = []

    def capture(key, form, *, run):
        order.append((*key[:3], form.name, run))

    monkeypatch.setattr(graphs, "_capture", capture)
    return graphs, order


DECODE, MIXED = GraphMode.DECODE, GraphMode.MIXED


def test_only_what_has_not_run_yet_is_run_before_it_is_captured(recorded):
    """The largest first. A second form of a size differs in attention alone, which has run in that form by then."""
    graphs, order = recorded
    graphs.provide(GraphSizes((64, 80, 96), (96,)).whole_steps())
    assert order == [
        (DECODE, 96, False, "DECODES", True),
        (DECODE, 96, False, "EVEN_DECODES", True),
        (MIXED, 96, False, "MIXED", True),
        (MIXED, 96, False, "NEW_PROMPTS", True),
        (DECODE, 80, False, "DECODES", True),
        (DECODE, 80, False, "EVEN_DECODES", False),
        (DECODE, 64, False, "DECODES", True),
    ]
    assert graphs.count(graphs.captured()) == len(order)
    assert graphs.num_postponed == 0


def test_on_demand_each_graph_is_captured_once_when_a_step_or_an_idle_group_wants_it(recorded):
    graphs, order = recorded
    graphs.on_demand = True
    sizes = GraphSizes((64, 80, 96), (80, 96))
    graphs.provide(sizes.whole_steps())
    graphs.provide([GraphKey(DECODE, rows, True) for rows in (80, 96)])
    largest = [(DECODE, 96, False), (MIXED, 96, False), (DECODE, 96, True)]
    assert list(dict.fromkeys(one[:3] for one in order)) == largest

    captures = []
    capture_all = graphs._capture_all
    graphs._capture_all = lambda keys: (captures.append(graphs.capturing), capture_all(keys))
    for _ in range(2):
        graphs.require(GraphKey(DECODE, 64))
    graphs.require(GraphKey(DECODE, 96))
    assert captures == [True] and not graphs.capturing
    assert order[6:] == [(DECODE, 64, False, "DECODES", True)]
    while graphs.num_postponed:
        graphs.capture_next()
    idle = [(DECODE, 80, True), (DECODE, 80, False), (MIXED, 80, False)]
    assert list(dict.fromkeys(one[:3] for one in order[7:])) == idle
    assert all(run for *key, form, run in order[7:] if form in ("DECODES", "MIXED"))
    assert len(order) == len(set(order)) == graphs.count(graphs.captured())
    assert graphs.captured() >= set(sizes.whole_steps())


def test_graphs_with_adapters_are_captured_beside_those_without(recorded):
    graphs, order = recorded
    sizes = GraphSizes((64, 80), (96,), adapters=True)
    keys = sizes.whole_steps()
    assert len(keys) == 6 and {key.adapters for key in keys} == {False, True}
    graphs.on_demand = True
    graphs.provide(keys)
    largest = {GraphKey(DECODE, 80), GraphKey(MIXED, 96)}
    assert graphs.captured() == largest | {key._replace(adapters=True) for key in largest}
    assert all(run for *key, form, run in order), "the products of adapters have not run before"
    assert graphs.num_postponed == 2
    for _ in range(2):
        graphs.capture_next()
    assert graphs.num_postponed == 0


def test_graphs_that_were_discarded_or_closed_are_not_captured_later(recorded):
    graphs, order = recorded
    graphs.on_demand = True
    keys = [GraphKey(DECODE, rows, cut) for rows in (64, 80, 96) for cut in (False, True)]
    graphs.provide(keys)
    graphs.drop_ubatches()
    graphs.discard([GraphKey(DECODE, 64)])
    del order[:]
    graphs.capture_next()
    assert graphs.num_postponed == 0
    assert {one[:3] for one in order} == {(DECODE, 80, False)}
    graphs.provide(keys[:4:2])
    graphs.close()
    assert graphs.num_postponed == 0


FIRST = GraphKey(DECODE, 4, drafts=1)


def test_a_step_gets_its_graphs_before_its_batch_is_built(monkeypatch):
    """A capture overwrites the buffers of batches."""
    runner = object.__new__(ModelRunner)
    order: list[object] = []

    def build(*_: object, **__: object) -> None:
        order.append("build")
        raise InterruptedError

    graphs = object.__new__(cuda_graphs.StepGraphs)
    graphs._drafts = SimpleNamespace(keys_of=lambda plan: (FIRST, None))
    monkeypatch.setattr(graphs, "require", order.append)
    runner.graphs = graphs
    runner._builder, runner._rank = SimpleNamespace(build=build), 0
    plan = StepPlan(True, (3,), 4, DECODE, ubatch=True)
    with pytest.raises(InterruptedError):
        runner.launch(SimpleNamespace(admitted=[]), plan)
    assert order == [GraphKey(DECODE, 4, True), FIRST, "build"]


def small(most: int) -> st.SearchStrategy:
    return st.one_of(st.none(), st.integers(2, most))


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 300), st.booleans()),
    st.tuples(small(40), small(300), st.integers(2, 4)),
    st.lists(st.tuples(st.sampled_from(ForwardMode), st.integers(1, 300)), min_size=1, max_size=5),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
)
@example((40, 300, True), (10, 200, 2), [(ForwardMode.DECODE, 20)], 2, True, False)
def test_every_step_finds_its_graph(limits, overlap, group, rows_per_seq, prompts, decodes):
    """Whatever the ranks have, the plan names a graph that was captured, or none. Models of vectors do not decode."""
    max_seqs, max_tokens, mixed = limits
    min_decode, min_prefill, num_ubatches = overlap
    sizes = GraphSizes(
        decode_sizes(min(max_seqs, max_tokens)) if decodes else (),
        mixed_sizes(max_tokens) if mixed else (),
        decode_sizes(min(rows_per_seq * max_seqs, max_tokens)) if mixed and decodes else (),
    )
    policy = replace(never(""), min_decode_tokens=min_decode, min_prefill_tokens=min_prefill)
    captured = {*sizes.whole_steps(), *ubatch_graphs(sizes, policy, num_ubatches)}

    def votes():
        for mode, tokens in group:
            most = {ForwardMode.IDLE: 0, ForwardMode.DECODE: min(max_seqs, max_tokens)}
            tokens = min(tokens, most.get(mode, max_tokens))
            wants = int(policy.wants(mode, tokens))
            voted = sizes.vote(mode, tokens, prompts=prompts)
            yield vote(tokens, wants_ubatch=wants, **voted)

    plan = decide(rows(*votes()), PlanConfig(equal_tokens=False, num_ubatches=num_ubatches))
    if plan.run and plan.graph_mode:
        assert GraphKey(plan.graph_mode, plan.padded_tokens, plan.ubatch) in captured
    if mixed and plan.run:
        assert plan.graph_mode
    several = any(mode.is_extend_or_mixed() for mode, _ in group)
    if plan.graph_mode == GraphMode.VERIFY:
        assert not (several and prompts)


def test_memory_of_other_processes_is_not_that_of_graphs(monkeypatch):
    """While a rank captures, another process may allocate gigabytes of the device."""
    reserved, calls = iter((5_000, 5_700)), []
    cuda = SimpleNamespace(
        synchronize=lambda device: None,
        empty_cache=lambda: calls.append("empty_cache"),
        memory_reserved=lambda device: calls.append("reserved") or next(reserved),
        mem_get_info=lambda device: pytest.fail("counts other processes"),
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    graphs = object.__new__(cuda_graphs.StepGraphs)
    graphs._model = SimpleNamespace(device="cuda:0")
    graphs._capture_all = lambda keys, progress: calls.append(keys)
    assert graphs.capture(["key"]) == 700
    assert calls == ["empty_cache", "reserved", ["key"], "reserved"]
