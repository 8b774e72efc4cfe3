"""Forwards as CUDA graphs, one for each padded number of rows: a step then costs the host one launch.

A graph leads from the token ids to the hidden states of all rows, or to the logits of decodes, whole or in ubatches.
Passes of a draft model behind steps have graphs of their own. Attention is planned before each replay; the graph reads
tokens and their number at fixed addresses. Knows nothing of requests or votes.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch

from kernels.attention.base import GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.backends.graph_planner import GraphPlanner
from kernels.backends.select import Backends
from kernels.host.host_copy import StepClock
from workers.models.decoder import DecoderLM
from workers.runner.batch_builder import ForwardBatchBuilder
from workers.runner.draft_graphs import DraftGraphs, TargetStates
from workers.runner.draft_passes import DraftPasses
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_sync import GraphMode, StepPlan
from workers.ubatch.wrapper import UBatchWrapper

logger = logging.getLogger(__name__)

REPLAYS = 3  # of a graph that is timed

Progress = Callable[[int, int], None]
T = TypeVar("T")

_IDLE = ScheduledBatch.of([])


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device, one because cuBLAS keeps a workspace for each stream."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@dataclass(frozen=True)
class CapturedGraph:
    """One captured graph."""

    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True)
class ForwardGraph(CapturedGraph):
    """One captured forward of the model. The next replay of any graph overwrites its results.

    hidden_TD   all rows
    logits_TV   float32, all rows; None for graphs of MIXED steps
    hidden_after  by number of a layer, all rows after it
    """

    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor | None
    hidden_after: dict[int, torch.Tensor]

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Return the float32 logits of batch.logits_indices; None without any or if the graph has no logits."""
        if self.logits_TV is None or not len(batch.logits_indices):
            return None
        if len(batch.logits_indices) == batch.num_tokens:
            return self.logits_TV[: batch.num_tokens]
        return self.logits_TV.index_select(0, batch.logits_indices)


class StepGraphs:
    """The graphs of one rank, of up to `sizes.largest` rows, for sequences of up to `max_blocks` KV blocks.

    All graphs share one memory pool. The largest is captured first, so that smaller ones fit into its memory.

    ubatches    runs the model for the graphs of steps in ubatches
    passes      of a draft model, which are captured too if its attention can be; None: there is none
    on_demand   `provide` captures the largest graphs alone; a step that needs another graph, or an idle group,
                captures it
    capturing   whether `require` captures now
    """

    def __init__(
        self,
        model: DecoderLM,
        backends: Backends,
        builder: ForwardBatchBuilder,
        *,
        sizes: GraphSizes,
        max_seqs: int,
        max_blocks: int,
        ubatches: UBatchWrapper | None,
        passes: DraftPasses | None = None,
        on_demand: bool = False,
    ):
        self.sizes, self.on_demand = sizes, on_demand
        self.capturing = False
        self._model, self._ubatches = model, ubatches
        self._whole = GraphPlanner.of(backends)
        self._expert_load = backends.expert_load
        self._builder = builder
        self._max_seqs = max_seqs
        self._graphs: dict[tuple[GraphKey, GraphForm], CapturedGraph] = {}
        self._postponed: set[GraphKey] = set()
        self._ran_forms: set[tuple[GraphKey, GraphForm]] = set()
        self._stream = _capture_stream(model.device)
        planners: list[GraphPlanner | UBatchWrapper] = [self._whole]
        if ubatches is not None:
            planners.append(ubatches)
        for planner in planners:
            planner.reserve_graphs(sizes.largest, max_seqs, max_blocks)
        width, vocab = model.config.hidden_size, model.config.vocab_size
        new: dict[str, Any] = {"device": model.device}
        self._hidden_TD = torch.zeros(sizes.largest, width, dtype=model.dtype, **new)
        self._after = {
            layer: torch.zeros(sizes.largest, width, dtype=model.dtype, **new)
            for layer in (() if passes is None else passes.model.aux_layers)
        }
        self._logits_TV = torch.zeros(sizes.most_logits, vocab, **new)
        self._drafts: DraftGraphs | None = None
        if passes is not None and passes.attention.graph:
            target = TargetStates(self._hidden_TD, self._after)
            self._drafts = passes.capture(sizes, target, self._replay, builder, max_seqs)

    @property
    def keys(self) -> list[GraphKey]:
        """The keys of all graphs of whole steps and of the passes behind them."""
        passes = [] if self._drafts is None else self._drafts.keys()
        return [*self.sizes.whole_steps(), *passes]

    def require_step(self, plan: StepPlan) -> GraphKey | None:
        """Capture the graphs of a step if they were postponed; return that of the forward. Collective, see `require`.

        None: the forward runs eagerly.
        """
        key = None
        if plan.graph_mode:
            key = GraphKey(plan.graph_mode, plan.padded_tokens, plan.ubatch, adapters=plan.adapters)
        passes = () if self._drafts is None else self._drafts.keys_of(plan)
        for wanted in filter(None, (key, *passes)):
            self.require(wanted)
        return key

    def count(self, keys: Iterable[GraphKey]) -> int:
        """Return the number of graphs of these keys, in all their forms."""
        return sum(len(self._forms(key)) for key in keys)

    def captured(self) -> set[GraphKey]:
        """Return the keys of all captured graphs."""
        return {key for key, _ in self._graphs}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.captured()

    def provide(self, keys: Iterable[GraphKey], progress: Progress | None = None) -> int:
        """Capture these graphs, or on demand the largest of each mode; return the bytes of those. Collective.

        The largest fill the memory pool, and run every form of attention before a step has to.
        """
        now = set(keys)
        if self.on_demand:
            largest = {(key.mode, key.ubatch, key.drafts, key.adapters): key for key in sorted(now)}
            self._postponed |= now
            now = set(largest.values())
        return self.capture(now, progress)

    def require(self, key: GraphKey) -> None:
        """Capture the graph of a step if it was postponed. Collective: all ranks run the step, with one key."""
        if key not in self._postponed:
            return
        started, self.capturing = time.perf_counter(), True
        self._capture_all([key])
        self.capturing = False
        spent = time.perf_counter() - started
        logger.debug("captured %s in %.2f s, %d are left", key, spent, len(self._postponed))

    @property
    def num_postponed(self) -> int:
        """Graphs that steps may need and that were not captured yet; equal on all ranks."""
        return len(self._postponed)

    def capture_next(self) -> None:
        """Capture the largest postponed graph. Collective."""
        self.require(max(self._postponed, key=lambda key: (key.rows, key)))

    def capture(self, keys: Iterable[GraphKey], progress: Progress | None = None) -> int:
        """Capture these graphs and return the bytes of tensors in their memory pool. Collective.

        The device's free memory would count what other processes allocate meanwhile.
        """
        device = self._model.device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        self._capture_all(keys, progress)
        return torch.cuda.memory_reserved(device) - before

    @torch.inference_mode()
    def _capture_all(self, keys: Iterable[GraphKey], progress: Progress | None = None) -> None:
        # A step in flight reads the buffers of batches, which a capture overwrites.
        torch.cuda.synchronize(self._model.device)
        keys = set(keys)
        self._postponed -= keys
        forms = [(key, form) for key in keys for form in self._forms(key)]
        forms.sort(key=lambda one: (one[0].rows, *one), reverse=True)
        ran: set[GraphKey] = set()
        for done, (key, form) in enumerate(forms):
            if progress is not None:
                progress(done, len(forms))
            # Forms of one size differ only in attention's kernel, which takes any number of rows.
            kind = key._replace(rows=0), form
            known = key in ran and kind in self._ran_forms
            self._graphs[key, form] = self._capture(key, form, run=not known)
            ran.add(key)
            self._ran_forms.add(kind)
        torch.cuda.synchronize(self._model.device)
        torch.cuda.empty_cache()  # eager runs on the stream of captures leave their memory with that stream
        if progress is not None:
            progress(len(forms), len(forms))

    def discard(self, keys: Iterable[GraphKey]) -> None:
        """Discard these graphs if they were captured or postponed."""
        gone = set(keys)
        self._postponed -= gone
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] not in gone}

    def discard_ubatches(self) -> None:
        """Discard all ubatched graphs."""
        self.discard(key for key in self.captured() | self._postponed if key.ubatch)

    def drop_ubatches(self) -> None:
        """Discard all ubatched graphs and the wrapper: no step will be cut."""
        self.discard_ubatches()
        self._ubatches = None

    def close(self) -> None:
        """Discard all graphs. Call it before the communicator is left, because NCCL waits for the end of its graphs."""
        torch.cuda.synchronize(self._model.device)
        self._graphs.clear()
        self._postponed.clear()

    def follows(self, key: GraphKey) -> bool:
        """Return whether the plan of this graph takes sequences with lengths that only the device has."""
        return key.mode == GraphMode.VERIFY and not key.ubatch and self._whole.follows(key.rows)

    def plan(self, batch: ForwardBatch, key: GraphKey) -> ForwardGraph:
        """Plan attention for a replay; the batch was built with `key.rows` rows. Returns the graph to replay."""
        planner, prompts = self._planner(key), key.mode.takes_several_rows
        assert prompts or batch.forward_mode.is_decode_or_idle(), f"{key} takes one row a sequence"
        if key.mode == GraphMode.VERIFY:
            form = planner.drafts_form(key.rows)
        else:
            form = planner.form(batch, key.rows, prompts=prompts)
        graph = self._graphs.get((key, form))
        assert isinstance(graph, ForwardGraph), f"a step replays {key}, which was not captured"
        planner.plan_graph(batch, key.rows, form, prompts=key.mode == GraphMode.MIXED)
        return graph

    def _replay(self, key: GraphKey, form: GraphForm) -> None:
        """Replay the graph of passes of a draft model."""
        graph = self._graphs.get((key, form))
        assert graph is not None, f"passes replay {key}, which was not captured"
        graph.graph.replay()

    def _planner(self, key: GraphKey) -> GraphPlanner | UBatchWrapper:
        if not key.ubatch:
            return self._whole
        assert self._ubatches is not None, "there are no ubatches"
        return self._ubatches

    def _forms(self, key: GraphKey) -> tuple[GraphForm, ...]:
        if key.drafts:
            assert self._drafts is not None, "there is no draft model"
            return self._drafts.forms(key)
        planner = self._planner(key)
        if key.mode == GraphMode.VERIFY:
            return (planner.drafts_form(key.rows),)
        return planner.forms(key.rows, prompts=key.mode.takes_several_rows)

    def _capture(self, key: GraphKey, form: GraphForm, *, run: bool) -> CapturedGraph:
        """Capture one graph. With `run` the forward first runs eagerly, so that kernels compile and allocate there."""
        batch = self._builder.build(_IDLE, key.rows, graph=True, adapters=key.adapters)
        self._plan_dummy(key, form)
        if key.drafts:
            assert self._drafts is not None, "there is no draft model"
            graph, _ = self._record(partial(self._drafts.run, batch, key), run=run)
            return CapturedGraph(graph)
        graph, _ = self._record(partial(self._forward, batch, key), run=run)
        logits_TV = self._logits_TV[: key.rows] if key.mode.gives_logits else None
        after = {layer: hidden_TD[: key.rows] for layer, hidden_TD in self._after.items()}
        return ForwardGraph(graph, self._hidden_TD[: key.rows], logits_TV, after)

    def _plan_dummy(self, key: GraphKey, form: GraphForm) -> None:
        """Plan attention for decodes without context, of which K and V are not written."""
        count = min(key.rows, self._max_seqs)
        decodes = AttentionBatch.dummy_decodes(count, self._model.device)
        if not key.drafts:
            prompts = key.mode == GraphMode.MIXED
            self._planner(key).plan_graph(decodes, key.rows, form, prompts=prompts)
            return
        assert self._drafts is not None, "there is no draft model"
        self._drafts.plan_dummy(decodes, key, form)

    @torch.inference_mode()
    def seconds(self, key: GraphKey) -> float:
        """Return the device's seconds of a replay with random tokens in all rows, without context. Collective.

        But with states of linear attention, which are most of what it reads and writes. Before there are sequences.
        """
        form = self._forms(key)[-1]
        device = self._model.device
        batch = self._builder.build(_IDLE, key.rows, graph=True)
        assert isinstance(batch.num_token_non_padded, torch.Tensor)
        batch.num_token_non_padded.fill_(key.rows)
        batch.input_ids.random_(self._model.config.vocab_size)
        self._plan_dummy(key, form)
        if not key.drafts:
            drafts = key.mode == GraphMode.VERIFY
            self._whole.plan_states(key.rows, self._max_seqs, drafts=drafts)
        replay = self._graphs[key, form].graph.replay
        replay()
        clock = StepClock(device)
        clock.mark()
        for _ in range(REPLAYS):
            replay()
        clock.mark()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock.seconds()[0] / REPLAYS

    def _record(self, forward: Callable[[], T], *, run: bool) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture a function; return its graph, and its result, which is in the memory pool. run: as in `_capture`."""
        if not self._graphs:  # a pool is freed with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if run:
                forward()
            # thread_local, because other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = forward()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result

    def _forward(self, batch: ForwardBatch, key: GraphKey) -> None:
        """Run the forward into the buffers of hidden states and logits, and count the rows of the experts."""
        self._expert_load.begin()
        model = self._ubatches if key.ubatch else self._model
        assert model is not None, "there are no ubatches"
        after = dict(self._after)
        resolved = batch.resolved(self._builder.last_tokens)
        resolved = replace(resolved, spread_copies=key.mode == GraphMode.MIXED)
        hidden_TD = model.forward(resolved, hidden_after=after or None)
        for layer, kept_TD in self._after.items():
            kept_TD[: key.rows].copy_(after[layer])
        self._hidden_TD[: key.rows].copy_(hidden_TD)
        if key.mode.gives_logits:
            out_TV = self._logits_TV[: key.rows]
            self._model.compute_logits(hidden_TD, out=out_TV, adapters=resolved.adapters)
        self._expert_load.finish()
