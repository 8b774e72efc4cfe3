"""Steps with drafts in graphs, on a CPU: a replay runs the captured forward again, over the buffers of the capture."""

from collections import Counter

import pytest

from kernels.attention.base import GraphForm
from tests.unit.graph_fakes import eager_graphs
from tests.unit.test_drafts import PROMPTS, SALTS, Served, drafts_from, no_drafts, served
from tests.unit.test_state_drafts import served_states
from workers.runner.graph_sizes import GraphSizes, decode_sizes, mixed_sizes

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
