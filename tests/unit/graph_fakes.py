"""Graphs on a CPU: a replay runs the captured function again, over the buffers of the capture."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.base import Attention, GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.linear_attention.base import LinearAttention
from workers.runner import cuda_graphs
from workers.runner.cuda_graphs import StepGraphs
from workers.runner.graph_sizes import GraphSizes
from workers.runner.model_runner import ModelRunner


class EagerGraphs(StepGraphs):
    """Graphs that run the model at each replay; attention is planned for the batch instead of at fixed addresses."""

    def _record(self, forward: Callable[[], Any], *, run: bool) -> tuple[Any, Any]:
        return SimpleNamespace(replay=forward), None


class EagerPlanner:
    """Attentions without graphs in place of attentions with them.

    Attention on a CPU writes K and V of each row. There is a spare block for rows that write none.
    """

    def __init__(self, attention: Attention, linear: LinearAttention | None = None) -> None:
        self._attention, self._linear = attention, linear
        caches, axis = attention.kv_caches, 0 if attention.mla else 1
        self._spare_slot = caches[0].shape[axis] * attention.block_size
        attention.bind([torch.cat((cache, cache.narrow(axis, 0, 1)), axis) for cache in caches])

    def reserve_graphs(self, *sizes: int) -> None:
        pass

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        return (GraphForm.NEW_PROMPTS, GraphForm.MIXED) if prompts else (GraphForm.DECODES,)

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        return self.forms(num_rows, prompts=prompts)[-1]

    def drafts_form(self, num_rows: int) -> GraphForm:
        return GraphForm.MIXED

    def plan_graph(
        self, batch: AttentionBatch, num_rows: int, form: GraphForm, *, prompts: bool = False
    ) -> None:
        self._plan(batch)
        if self._linear is not None:
            self._linear.plan(batch)

    def plan_states(self, num_rows: int, max_seqs: int, *, drafts: bool) -> None:
        if self._linear is not None:
            per_seq = 1 + drafts * self._linear.num_drafts
            device = self._linear.states[0].state.device
            self._linear.plan(AttentionBatch.dummy_states(num_rows, per_seq, max_seqs, device))

    def follows(self, num_rows: int) -> bool:
        return True

    def _plan(self, batch: AttentionBatch) -> None:
        slots = torch.where(batch.slot_mapping < 0, self._spare_slot, batch.slot_mapping)
        lens = batch.seq_lens_cpu
        if batch.behind is not None:
            lens = (lens - batch.behind.numpy()).astype(np.int32)
        self._attention.plan(replace(batch, slot_mapping=slots, seq_lens_cpu=lens, behind=None))


class ShortenedPlanner(EagerPlanner):
    """The same, with lengths that the forward sets."""

    def plan_graph(
        self, batch: AttentionBatch, num_rows: int, form: GraphForm, *, prompts: bool = False
    ) -> None:
        super().plan_graph(batch, num_rows, form, prompts=prompts)
        self._batch, self._num_rows = batch, num_rows

    def shorten(self, lens_R: torch.Tensor, slots_R: torch.Tensor) -> None:
        batch, count = self._batch, self._batch.num_seqs
        assert len(lens_R) == len(slots_R) == self._num_rows and not lens_R[count:].any()
        lens = lens_R[:count].numpy()
        assert ((lens >= 1) & (lens <= batch.seq_lens_cpu)).all(), (lens, batch.seq_lens_cpu)
        assert (slots_R[count:] == -1).all()
        self._plan(replace(batch, seq_lens_cpu=lens, slot_mapping=slots_R[:count]))


def make_capturable(
    attention: Attention, monkeypatch: pytest.MonkeyPatch, *, mixed: bool = True
) -> None:
    """Let an attention of a CPU be one for graphs, with lengths of the device; mixed: with prompts too."""
    planner = ShortenedPlanner(attention)
    for name, value in (("graph", True), ("mixed_graph", mixed), ("shortens", True)):
        monkeypatch.setattr(attention, name, value, raising=False)
    names = ("reserve_graphs", "forms", "form", "drafts_form", "follows", "plan_graph", "shorten")
    for name in names:
        monkeypatch.setattr(attention, name, getattr(planner, name), raising=False)


def eager_graphs(
    runner: ModelRunner, sizes: GraphSizes, monkeypatch: pytest.MonkeyPatch
) -> EagerGraphs:
    """Return graphs of these sizes for up to 16 sequences, none captured."""
    cuda = SimpleNamespace(
        synchronize=lambda device: None,
        empty_cache=lambda: None,
        memory_reserved=lambda device: 0,
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    backends = runner._backends
    planner = EagerPlanner(backends.attention, backends.linear_attention)
    monkeypatch.setattr(cuda_graphs.GraphPlanner, "of", lambda backends: planner)
    return EagerGraphs(
        runner.model,
        runner._backends,
        runner._builder,
        sizes=sizes,
        max_seqs=16,
        max_blocks=64,
        ubatches=None,
        passes=runner.drafts,
    )
