"""Whole decode forwards as CUDA graphs, one for each padded number of rows: a step then costs the host one launch.

A graph holds everything from the token ids to the logits of all rows. Attention is planned before each replay; tokens
and their number are read at fixed addresses. Knows nothing of requests or votes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.select import Kernels, Selection
from workers.config import SchedulerConfig
from workers.forward_batch import ForwardBatch, ForwardBatchBuilder, resolve_pending
from workers.kernel_choice import graphs_off
from workers.models.qwen3_moe import Qwen3MoeForCausalLM
from workers.scheduler import ScheduledBatch
from workers.step_sync import ForwardMode, GraphMode

Progress = Callable[[int, int], None]

_IDLE = ScheduledBatch([], np.zeros(0, np.int64), 0, 0, np.zeros(0, bool), [])


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the graphs that serve 1 to `max_rows` decodes, rising: every one up to 8, then four an octave.

    Padding to the next one wastes less than 9 % on average, whatever the maximum.
    """
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size += 1 << max(0, size.bit_length() - 3)
    return (*sizes, max_rows)


def graph_vote(
    sizes: Sequence[int], forward_mode: ForwardMode, num_tokens: int
) -> tuple[GraphMode, int]:
    """What a rank that has graphs of these sizes votes for its part of a step: the mode, and the smallest that fits."""
    if forward_mode in (ForwardMode.IDLE, ForwardMode.DECODE):
        for size in sizes:
            if num_tokens <= size:
                return GraphMode.FULL, size
    return GraphMode.NONE, num_tokens


def graphs_to_capture(
    scheduler: SchedulerConfig, selection: Selection, device: torch.device
) -> tuple[int, ...]:
    """Sizes of the graphs of a rank, none where they are off or cannot be.

    Raises GraphsUnavailableError where the configuration demands what cannot be.
    """
    if graphs_off(scheduler.cuda_graphs, selection, device.type) is not None:
        return ()
    return graph_sizes(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))


@dataclass(frozen=True)
class DecodeGraph:
    """One captured forward. Its results are overwritten by the next replay of any."""

    graph: torch.cuda.CUDAGraph
    hidden_TD: torch.Tensor
    logits_TV: torch.Tensor
    offs_Le: torch.Tensor | None

    def replay(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_TD, and the float32 logits of the rows that sample, if any do."""
        self.graph.replay()
        num_sampling = len(batch.logits_indices)
        if num_sampling == batch.num_tokens:
            return self.hidden_TD, self.logits_TV[:num_sampling] if num_sampling else None
        if not num_sampling:
            return self.hidden_TD, None
        return self.hidden_TD, self.logits_TV.index_select(0, batch.logits_indices)


@dataclass(frozen=True)
class _Decodes:
    """Stands in for decodes where attention is planned for a capture: one token each, which goes nowhere."""

    num_tokens: int
    num_seqs: int
    num_decodes: int
    query_start_loc_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def of(cls, count: int, device: torch.device) -> "_Decodes":
        return cls(
            count,
            count,
            count,
            np.arange(count + 1, dtype=np.int32),
            np.ones(count, dtype=np.int32),
            torch.zeros(count, 1, dtype=torch.int64, device=device),
            torch.full((count,), -1, dtype=torch.int64, device=device),
        )


class DecodeGraphs:
    """The graphs of one rank, for up to `max_rows` sequences of up to `max_blocks` KV blocks.

    All share one pool of memory, so the largest is captured first and the others fit into what it took. `last_tokens`
    as in ForwardBatchBuilder.build.
    """

    def __init__(
        self,
        model: Qwen3MoeForCausalLM,
        kernels: Kernels,
        builder: ForwardBatchBuilder,
        *,
        last_tokens: torch.Tensor | None,
        max_rows: int,
        max_blocks: int,
    ):
        self._model = model
        self._attention: Any = kernels.attention
        self._expert_load = kernels.expert_load
        self._builder = builder
        self._last_tokens = last_tokens
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(model.device)
        self._attention.reserve_graphs(max_rows, max_blocks)
        vocab_size = model.config.vocab_size
        self._logits_TV = torch.empty(max_rows, vocab_size, device=model.device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], progress: Progress | None = None) -> int:
        """Capture the graphs of these sizes; returns the bytes that they took.

        Collective: on all ranks with the same sizes at the same time.
        """
        free, _ = torch.cuda.mem_get_info(self._model.device)
        forms = [(size, cuts) for size in sizes for cuts in self._attention.graph_forms(size)]
        for done, (size, cuts) in enumerate(sorted(forms, reverse=True)):
            if progress is not None:
                progress(done, len(forms))
            self._graphs[size, cuts] = self._capture(size, cuts)
        torch.cuda.synchronize(self._model.device)
        if progress is not None:
            progress(len(forms), len(forms))
        return free - torch.cuda.mem_get_info(self._model.device)[0]

    def plan(self, batch: ForwardBatch, size: int) -> DecodeGraph:
        """Prepare a replay for decodes that were built with `size` rows."""
        cuts = self._attention.graph_cuts(batch, size)
        self._attention.plan_graph(batch, size, cuts)
        return self._graphs[size, cuts]

    def _capture(self, size: int, cuts: bool) -> DecodeGraph:
        batch = self._builder.build(_IDLE, size, (0,))
        self._attention.plan_graph(_Decodes.of(size, self._model.device), size, cuts)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Once as it is: what compiles or allocates at first use does so here.
            self._forward(batch, size)
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden_TD, offs_Le = self._forward(batch, size)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return DecodeGraph(graph, hidden_TD, self._logits_TV[:size], offs_Le)

    def _forward(self, batch: ForwardBatch, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_TD, and the expert load of all layers; logits go to their buffer."""
        input_ids = batch.input_ids
        if self._last_tokens is not None:
            input_ids = resolve_pending(input_ids, self._last_tokens)
        self._expert_load.watch()
        hidden_TD = self._model.forward(
            replace(batch, input_ids=input_ids, num_tokens=batch.num_tokens_gpu)
        )
        self._model.compute_logits(hidden_TD, out=self._logits_TV[:size])
        return hidden_TD, self._expert_load.take()
