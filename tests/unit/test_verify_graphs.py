"""Steps with drafts in graphs, on a CPU: a replay runs the captured forward again, over the buffers of the capture."""

from collections import Counter
from types import SimpleNamespace

import pytest

from kernels.attention.base import GraphForm
from tests.unit.test_drafts import PROMPTS, SALTS, Served, drafts_from, no_drafts, served
from workers.runner import cuda_graphs
from workers.runner.cuda_graphs import ForwardGraph, StepGraphs
from workers.runner.graph_sizes import GraphSizes, decode_sizes, mixed_sizes

__all__ = ["served"]  # a fixture


class EagerGraphs(StepGraphs):
    """Graphs that run the model at each replay; attention is planned for the batch instead of at fixed addresses."""

    def _capture(self, key, form, *, run):
        batch = self._builder.build(cuda_graphs._IDLE, key.rows, graph=True)
        logits_TV = self._logits_TV[: key.rows] if key.mode.gives_logits else None
        replay = SimpleNamespace(replay=lambda: self._forward(batch, key))
        return ForwardGraph(replay, self._hidden_TD[: key.rows], logits_TV, {})


class EagerPlanner:
    """Attention without graphs in place of attention with them."""

    def __init__(self, attention) -> None:
        self._attention = attention

    def reserve_graphs(self, *sizes: int) -> None:
        pass

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        return (GraphForm.NEW_PROMPTS, GraphForm.MIXED) if prompts else (GraphForm.DECODES,)

    def form(self, batch, num_rows: int, *, prompts: bool) -> GraphForm:
        return self.forms(num_rows, prompts=prompts)[-1]

    def plan_graph(self, batch, num_rows: int, form: GraphForm) -> None:
        self._attention.plan(batch)


@pytest.fixture
def captured(served: Served, monkeypatch):
    """The server with graphs of up to 16 rows."""
    cuda = SimpleNamespace(
        synchronize=lambda device: None,
        empty_cache=lambda: None,
        memory_reserved=lambda device: 0,
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    runner, engine = served.epoch.runner, served.epoch.engine
    planner = EagerPlanner(runner._backends.attention)
    monkeypatch.setattr(cuda_graphs.GraphPlanner, "of", lambda backends: planner)
    sizes = GraphSizes(decode_sizes(3), mixed_sizes(32), decode_sizes(15))
    graphs = EagerGraphs(
        runner.model,
        runner._backends,
        runner._builder,
        sizes=sizes,
        max_seqs=16,
        max_blocks=64,
        ubatches=None,
    )
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
