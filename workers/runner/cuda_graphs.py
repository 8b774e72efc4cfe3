"""Whole forwards as CUDA graphs, one for each padded number of rows: a step then costs the host one launch.

A graph holds everything from the token ids to the hidden states of all rows, of decodes to their logits, whole or in
slices. Attention is planned before each replay; tokens and their number are read at fixed addresses. Knows nothing of
requests or votes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.base import GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.backends.select import Backends
from workers.engine.scheduler import ScheduledBatch
from workers.engine.step_sync import GraphMode
from workers.models.causal_lm import CausalLM
from workers.runner.batch_builder import ForwardBatchBuilder
from workers.runner.forward_batch import ForwardBatch
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.ubatch.wrapper import UBatchWrapper

Progress = Callable[[int, int], None]

_IDLE = ScheduledBatch([], np.zeros(0, np.int64), 0, 0, np.zeros(0, bool), [])


@dataclass(frozen=True)
class ForwardGraph:
    """One captured forward. Its results are overwritten by the next replay of any.

    hidden_TD   of all rows
    logits_TV   float32, of all rows; None where prompts are among them
    """

    graph: torch.cuda.CUDAGraph
    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor | None
    offs_Le: torch.Tensor | None

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """float32 of the rows that sample; None where none do, or the graph has not computed them."""
        if self.logits_TV is None or not len(batch.logits_indices):
            return None
        if len(batch.logits_indices) == batch.num_tokens:
            return self.logits_TV[: batch.num_tokens]
        return self.logits_TV.index_select(0, batch.logits_indices)


class StepGraphs:
    """The graphs of one rank, of up to `sizes.largest` rows, for sequences of up to `max_blocks` KV blocks.

    All share one pool of memory, so the largest is captured first and the others fit into what it took. `ubatches`
    runs the model in ubatches, for the graphs of such steps.
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: Backends,
        builder: ForwardBatchBuilder,
        *,
        sizes: GraphSizes,
        max_seqs: int,
        max_blocks: int,
        ubatches: UBatchWrapper | None,
    ):
        self.sizes = sizes
        self._model, self._microbatches = model, ubatches
        self._attention: Any = kernels.attention
        self._expert_load = kernels.expert_load
        self._builder = builder
        self._max_seqs = max_seqs
        self._graphs: dict[tuple[GraphKey, GraphForm], ForwardGraph] = {}
        self._stream = torch.cuda.Stream(model.device)
        for attention in filter(None, (self._attention, ubatches)):
            attention.reserve_graphs(sizes.largest, max_seqs, max_blocks)
        width, vocab = model.config.hidden_size, model.config.vocab_size
        new: dict[str, Any] = {"device": model.device}
        self._hidden_TD = torch.zeros(sizes.largest, width, dtype=model.dtype, **new)
        self._logits_TV = torch.zeros(max(sizes.decode, default=0), vocab, **new)

    def count(self, keys: Iterable[GraphKey]) -> int:
        """How many graphs these are, in all their forms."""
        return sum(len(self._forms(key)) for key in keys)

    def captured(self) -> set[GraphKey]:
        """What can be replayed."""
        return {key for key, _ in self._graphs}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.captured()

    @torch.inference_mode()
    def capture(self, keys: Iterable[GraphKey], progress: Progress | None = None) -> int:
        """Capture these graphs; returns the bytes that they took.

        Collective: on all ranks the same at the same time.
        """
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._model.device)
        forms = [(key, form) for key in keys for form in self._forms(key)]
        forms.sort(key=lambda one: (one[0].rows, one[0].mode, one[1]), reverse=True)
        ran: set[GraphKey] = set()
        ran_forms: set[tuple[bool, GraphForm]] = set()
        for done, (key, form) in enumerate(forms):
            if progress is not None:
                progress(done, len(forms))
            # Forms of a size differ in attention's kernel alone, which takes any number of rows.
            known = key in ran and (key.ubatch, form) in ran_forms
            self._graphs[key, form] = self._capture(key, form, run=not known)
            ran.add(key)
            ran_forms.add((key.ubatch, form))
        torch.cuda.synchronize(self._model.device)
        torch.cuda.empty_cache()
        if progress is not None:
            progress(len(forms), len(forms))
        return free - torch.cuda.mem_get_info(self._model.device)[0]

    def discard(self, keys: Iterable[GraphKey]) -> None:
        """Forget these graphs, if they were captured."""
        gone = set(keys)
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] not in gone}

    def discard_ubatches(self) -> None:
        """Forget what was captured in slices."""
        self.discard(key for key in self.captured() if key.ubatch)

    def drop_ubatches(self) -> None:
        """No step will be cut."""
        self.discard_ubatches()
        self._microbatches = None

    def close(self) -> None:
        """Forget all. A communicator whose operations are still in graphs cannot be left: NCCL waits for their end."""
        torch.cuda.synchronize(self._model.device)
        self._graphs.clear()

    def plan(self, batch: ForwardBatch, key: GraphKey) -> ForwardGraph:
        """Prepare a replay for a batch that was built with `key.rows` rows."""
        attention, prompts = self._attention_of(key), key.mode == GraphMode.MIXED
        form = attention.form(batch, key.rows, prompts=prompts)
        graph = self._graphs.get((key, form))
        assert graph is not None, f"a step replays {key}, which was not captured"
        attention.plan_graph(batch, key.rows, form)
        return graph

    def _attention_of(self, key: GraphKey) -> Any:
        return self._microbatches if key.ubatch else self._attention

    def _forms(self, key: GraphKey) -> tuple[GraphForm, ...]:
        prompts = key.mode == GraphMode.MIXED
        forms: tuple[GraphForm, ...] = self._attention_of(key).forms(key.rows, prompts=prompts)
        return forms

    def _capture(self, key: GraphKey, form: GraphForm, *, run: bool) -> ForwardGraph:
        """With `run` once as it is before: what compiles or allocates at first use does so there."""
        if not self._graphs:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        batch = self._builder.build(_IDLE, key.rows, graph=True)
        decodes = AttentionBatch.dummy_decodes(min(key.rows, self._max_seqs), self._model.device)
        self._attention_of(key).plan_graph(decodes, key.rows, form)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if run:
                self._forward(batch, key)
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                offs_Le = self._forward(batch, key)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        logits_TV = self._logits_TV[: key.rows] if key.mode == GraphMode.DECODE else None
        return ForwardGraph(graph, self._hidden_TD[: key.rows], logits_TV, offs_Le)

    def _forward(self, batch: ForwardBatch, key: GraphKey) -> torch.Tensor | None:
        """The expert load of all layers; hidden states and logits go to their buffers."""
        self._expert_load.watch()
        model = self._microbatches if key.ubatch else self._model
        assert model is not None, "there are no ubatches"
        hidden_TD = model.forward(batch.resolved(self._builder.last_tokens))
        self._hidden_TD[: key.rows].copy_(hidden_TD)
        if key.mode == GraphMode.DECODE:
            self._model.compute_logits(hidden_TD, out=self._logits_TV[: key.rows])
        return self._expert_load.take()
