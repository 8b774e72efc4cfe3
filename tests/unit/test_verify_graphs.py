"""Steps with drafts in graphs, on a CPU: a replay runs the captured forward again, over the buffers of the capture."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.base import GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.backends.graph_planner import GraphPlanner
from tests.unit.graph_fakes import eager_graphs
from tests.unit.test_drafts import PROMPTS, SALTS, Served, drafts_from, no_drafts, served
from tests.unit.test_state_drafts import served_states
from workers.runner.graph_sizes import GraphKey, GraphSizes, decode_sizes, mixed_sizes
from workers.step.step_sync import GraphMode

__all__ = ["served"]  # a fixture


@pytest.fixture(scope="module")
def of_states(tmp_path_factory):
    """A server of delta nets."""
    with served_states(tmp_path_factory.mktemp("states"), "qwen3_next") as server:
        yield server


@pytest.fixture(params=["served", "of_states"])
def captured(request, monkeypatch):
    """The server with graphs of up to 16 rows."""
    served: Served = request.getfixturevalue(request.param)
    runner, engine = served.epoch.runner, served.epoch.engine
    sizes = GraphSizes(decode_sizes(3), mixed_sizes(32), decode_sizes(15))
    graphs = eager_graphs(runner, sizes, monkeypatch)
    graphs.provide(sizes.whole_steps())
    monkeypatch.setattr(runner, "graphs", graphs)
    monkeypatch.setattr(engine, "_graph_sizes", sizes)
    return served


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5}])
def test_tokens_of_verify_graphs_equal_those_of_eager_steps(captured, params):
    served, params = captured, {"max_tokens": 20, **params}
    engine = served.epoch.engine
    sizes, engine._graph_sizes = engine._graph_sizes, GraphSizes()
    served.run(PROMPTS, no_drafts, next(SALTS), **params)
    expected = served.tokens()
    engine._graph_sizes = sizes
    before = Counter(engine.stats.kinds)
    served.run(PROMPTS, drafts_from(expected, wrong_every=3), next(SALTS), **params)
    assert served.tokens() == expected
    modes = Counter()
    for (_, graph_mode, _), count in (engine.stats.kinds - before).items():
        modes[graph_mode] += count
    assert modes["VERIFY"] > 3 and modes["MIXED"] and not modes["NONE"]
    forms = {form for key, form in engine.runner.graphs._graphs if key.mode.name == "VERIFY"}
    assert forms == {GraphForm.MIXED}


def test_replays_count_the_rows_of_experts_as_eager_steps(captured):
    served, params = captured, {"max_tokens": 5}
    engine, load = served.epoch.engine, served.epoch.backends.expert_load
    sizes, counted = engine._graph_sizes, []
    for graphs in (GraphSizes(), sizes):
        engine._graph_sizes, before_Ls = graphs, load.counts_Ls.clone()
        served.run(PROMPTS, no_drafts, next(SALTS), **params)
        counted.append(load.counts_Ls - before_Ls)
    assert counted[0].sum() > 0 and counted[0].equal(counted[1])


def test_graphs_are_timed_with_states(of_states, monkeypatch):
    """Decodes and drafts read and write the slots of sequences, and tokens afterwards are those of before."""
    runner = of_states.epoch.runner
    of_states.run(PROMPTS, no_drafts, next(SALTS), max_tokens=8)
    expected = of_states.tokens()
    sizes = GraphSizes(decode_sizes(3), (), decode_sizes(15))
    graphs = eager_graphs(runner, sizes, monkeypatch)
    graphs._max_seqs = 3
    graphs.provide(graphs.keys)
    pools = runner._linear_attention.states
    for mode, rows, written in (
        (GraphMode.DECODE, 2, [1, 2]),
        (GraphMode.VERIFY, 15, [1, 2, 3]),
        (GraphMode.VERIFY, 5, [1]),
    ):
        for pool in pools:
            pool.state.zero_()
            pool.drafts.zero_()
        assert graphs.seconds(GraphKey(mode, rows)) > 0
        for pool in pools:
            assert pool.state.flatten(1).any(1).nonzero().flatten().tolist() == written
            drafted = pool.drafts.flatten(1).any(1).nonzero().flatten().tolist()
            assert drafted == (written if mode == GraphMode.VERIFY else [])
    monkeypatch.undo()
    of_states.run(PROMPTS, no_drafts, next(SALTS), max_tokens=8)
    assert of_states.tokens() == expected


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 12))
def test_sequences_that_fill_a_graph(num_rows, rows_per_seq, max_seqs):
    batch = AttentionBatch.dummy_states(num_rows, rows_per_seq, max_seqs, torch.device("cpu"))
    sizes = np.diff(batch.query_start_loc_cpu)
    assert batch.num_tokens == sizes.sum() == min(num_rows, max_seqs * rows_per_seq)
    assert (sizes >= 1).all() and (sizes <= rows_per_seq).all() and len(sizes) <= max_seqs
    assert (sizes[: batch.num_single_rows] == 1).all() and not batch.num_prompts
    assert (sizes[batch.num_single_rows :] > 1).all()


def test_linear_attention_is_planned_for_the_graph_that_is_timed():
    plans = []
    linear = SimpleNamespace(
        num_drafts=3,
        states=[SimpleNamespace(state=torch.zeros(1))],
        plan_graph=lambda batch, *rows, **kinds: plans.append((batch.num_seqs, *rows, kinds)),
    )
    planner = GraphPlanner(None, linear)
    planner.plan_states(8, 5, drafts=True)
    planner.plan_states(8, 5, drafts=False)
    GraphPlanner(None, None).plan_states(8, 5, drafts=True)
    assert plans == [
        (2, 8, {"prompts": False, "drafts": True}),
        (5, 8, {"prompts": False, "drafts": False}),
    ]
