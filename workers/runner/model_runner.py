"""One forward of one rank: builds the batch, runs the model, samples. Knows nothing of votes or of requests' ends."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.backends.select import Backends
from kernels.host.host_copy import StepClock
from kernels.pending import Pending
from workers.kv_cache.manager import KVCacheManager
from workers.kv_cache.state_snapshots import independent
from workers.models.decoder import DecoderLM
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.runner.batch_builder import ForwardBatchBuilder
from workers.runner.cuda_graphs import ForwardGraph, StepGraphs
from workers.runner.draft_graphs import TargetStates
from workers.runner.draft_passes import Drafted, DraftPasses
from workers.runner.draft_store import DraftStore
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.runner.image_rows import ImageRows
from workers.runner.ran import Forwarded, Ran, StepDraft
from workers.runner.row_logits import batch_logits
from workers.runner.row_masks import RowMasks
from workers.runner.step_results import ReadOutput, StepResults
from workers.sampling.grammar_bitmask import PendingBitmask
from workers.sampling.sampler import SampledTokens, Sampler
from workers.speculation.synthetic import SyntheticAcceptance
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch
from workers.step.step_output import StepOutput
from workers.step.step_sync import StepPlan
from workers.ubatch.wrapper import UBatchWrapper

BeforeDraws = Callable[[], None]
_NO_TOKENS = SampledTokens(torch.empty(0, dtype=torch.int64), [])
_NO_HIDDEN = torch.empty(0)


class ModelRunner:
    """Runs the model over the sequences of an InputBatch; the attention holds their KV caches.

    asynchronous   the next step may be launched before this step's tokens are read; they are kept on the device too
    ubatches       the same model in ubatches, for plans with `ubatch`
    graphs         captured forwards, for plans with a `graph_mode`
    drafts         passes of a draft model behind each step; None: there is none
    acceptance     of drafts in place of a comparison with the draws
    adapters       sequences may have adapters
    """

    def __init__(
        self,
        model: DecoderLM,
        backends: Backends,
        table: InputBatch,
        cache: KVCacheManager,
        *,
        rank: int,
        max_num_tokens: int,
        max_num_seqs: int,
        num_threads: int,
        device: torch.device,
        asynchronous: bool = False,
        ubatches: UBatchWrapper | None = None,
        drafts: DraftPasses | None = None,
        acceptance: SyntheticAcceptance | None = None,
        adapters: bool = False,
    ):
        self.model = model
        self.drafts, self._acceptance = drafts, acceptance
        self.ubatches, self.asynchronous = ubatches, asynchronous
        self._backends = backends
        self._max_num_seqs, self._max_blocks = max_num_seqs, cache.max_blocks
        self.graphs: StepGraphs | None = None
        self._attention = backends.attention
        self._linear_attention = backends.linear_attention
        self._expert_load = backends.expert_load
        self._rank, self._device = rank, device
        self._sampler = Sampler(table, max_num_seqs, model.config.vocab_size, device)
        self._masks = RowMasks(model.config.vocab_size, num_threads)
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        num_drafts = 0 if drafts is None else drafts.num_drafts
        self._accepted = AcceptedDrafts(
            max_num_seqs, num_drafts, device, self._linear_attention, asynchronous=asynchronous
        )
        # References to the drafts that the last launched step makes, of each sequence; None: it makes none, or the host
        # reads them before the next step.
        self.coming_drafts: list[tuple[int, ...]] | None = None
        self._store: DraftStore | None = None
        self._draft_clock: StepClock | None = None  # of the passes behind the last step
        if drafts is not None:
            drafts.last_tokens = self._accepted.last_tokens
            self._store = DraftStore(table, num_drafts, self._accepted.last_tokens)
        self._results = StepResults(model, self._accepted, self._store, self._copy_stream)
        self._builder = ForwardBatchBuilder(
            table,
            cache,
            max_num_tokens,
            max_num_seqs,
            device,
            adapters=adapters,
            shares=backends.attention.shared_reads is not None,
            images=ImageRows.of(model, max_num_tokens),
            accepted=self._accepted,
        )

    @torch.inference_mode()
    def launch(
        self, scheduled: ScheduledBatch, plan: StepPlan, before_draws: BeforeDraws | None = None
    ) -> Pending[StepOutput]:
        """Launch this rank's part of a step. On CPU it has ended at the return; on a GPU it may not have begun.

        before_draws   called once the forward is launched: then the host has the tokens that draws need; None: it has
                       them now

        Call it on every rank in every step that runs, with tokens or without. Wait for the outputs in order; at most
        one output may be outstanding when the next step is launched.
        """
        key = self._graph_key(plan)
        started = time.perf_counter()
        self._admit(scheduled)
        num_rows = plan.tokens_to_run(self._rank)
        batch = self._builder.build(
            scheduled,
            num_rows,
            graph=key is not None,
            adapters=plan.adapters,
            follows=key is not None and self.graphs is not None and self.graphs.follows(key),
        )
        self._copy_states(scheduled.state_copies)
        forward = self._plan(batch, plan, key)
        mask = self._masks.start(scheduled) if before_draws is None else None
        prepare = time.perf_counter() - started
        clock = StepClock(self._device)
        clock.mark()
        try:
            forwarded = (*forward(), self._read_load(plan))
        except BaseException:
            self._backends.all2all.reset()
            raise
        clock.mark()
        if before_draws is not None:
            before_draws()
            batch = self._builder.settled(scheduled, batch)
            mask = self._masks.start(scheduled)
        counts_B = None
        if self._acceptance is not None and scheduled.draft_token_ids is not None:
            counts_B = self._acceptance.counts(scheduled)
        reads = self._reads_drafts(scheduled, batch, plan, mask, counts_B)
        if reads:
            scheduled = self._with_tokens(scheduled, batch)
        sampled, read = self._try_output(
            scheduled, batch, forwarded, mask, clock, prepare, counts_B
        )
        drafted, self.coming_drafts = None, None
        if self.drafts is not None and plan.draft_reads:
            drafted = self._draft(self.drafts, scheduled, batch, plan, forwarded, sampled, counts_B)
        if not reads:
            scheduled = self._with_tokens(scheduled, batch)
        found = None if drafted is None else self._keep(scheduled, *drafted)
        return Pending(partial(read, scheduled, found))

    def _reads_drafts(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        plan: StepPlan,
        mask: PendingBitmask | None,
        counts_B: np.ndarray | None,
    ) -> bool:
        """Return whether the host needs the drafts of a step before its draws and passes; else it reads them behind."""
        if scheduled.draft_token_ids is None:
            return False
        if mask is not None or self._sampler.reads_tokens(batch.sampling_rows_cpu):
            return True
        drafts = self.drafts if plan.draft_reads else None
        return drafts is not None and drafts.reads_drafts(plan, counts_B)

    def _with_tokens(self, scheduled: ScheduledBatch, batch: ForwardBatch) -> ScheduledBatch:
        """Return the batch with tokens in place of references to drafts. Waits for the passes of the step before."""
        if self._store is None:
            return scheduled
        self._store.settle()
        return self._store.resolve(scheduled, batch)

    def _try_output(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        forwarded: Forwarded,
        mask: PendingBitmask | None,
        clock: StepClock,
        prepare: float,
        counts_B: np.ndarray | None,
    ) -> tuple[SampledTokens | None, ReadOutput]:
        """Sample and start to copy the results to the host; return the tokens, and the function that reads the output.

        An error is raised when the output is read, and then voted: a draft model's collectives still follow. There are
        no tokens then.
        """
        try:
            sampled = _NO_TOKENS
            logits_LV = forwarded[1]
            if logits_LV is not None:
                sampled = self._sample(logits_LV, batch, mask, scheduled.draft_token_ids)
            self._accepted.enter(scheduled, batch, sampled.token_B, counts_B)
            place = scheduled, batch, forwarded
            return sampled, self._results.copy(*place, sampled, clock, prepare, counts_B)
        except Exception as error:
            return None, partial(_raise, error)

    def _draft(
        self,
        drafts: DraftPasses,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        plan: StepPlan,
        forwarded: Forwarded,
        sampled: SampledTokens | None,
        counts_B: np.ndarray | None,
    ) -> tuple[Drafted, StepClock]:
        """Run the passes of the draft model behind a forward; return them with their times. Collective."""
        hidden_TD, _, hidden_after, _ = forwarded
        token_L = None if sampled is None else sampled.token_B.to(self._device)
        clock = StepClock(self._device)
        clock.mark()
        try:
            target = TargetStates(hidden_TD, hidden_after)
            drafted = drafts.run(scheduled, batch, plan, target, token_L, counts_B)
        except BaseException:
            self._backends.all2all.reset()
            raise
        clock.mark()
        return drafted, clock

    def _keep(self, scheduled: ScheduledBatch, drafted: Drafted, clock: StepClock) -> StepDraft:
        """Start to copy drafts to the host."""
        assert self._store is not None
        before, self._draft_clock = self._draft_clock, clock
        drafts_on_way = self._store.put(*drafted, self._copy_stream)
        if self.asynchronous:
            num_seqs = len(scheduled.seqs)
            self.coming_drafts = self._store.coming(drafts_on_way, drafted.rows, num_seqs)
        return StepDraft(drafted.rows, drafts_on_way, before)

    def _read_load(self, plan: StepPlan) -> torch.Tensor | None:
        """Return a copy of the counts of the experts' rows, which the next step adds to, in steps that read them."""
        counts_Ls = self._expert_load.counts_Ls
        return None if plan.load_step is None or counts_Ls is None else counts_Ls.clone()

    def _copy_states(self, copies: tuple[tuple[int, int], ...]) -> None:
        for sources, targets in independent(list(copies)):
            assert self._linear_attention is not None, "only linear attention has states"
            self._linear_attention.copy_slots(sources, targets)

    def _admit(self, scheduled: ScheduledBatch) -> None:
        for seq in scheduled.admitted:
            self._sampler.admit(seq)
            self._results.admit(seq)
            self._masks.admit(seq)

    def make_graphs(self, sizes: GraphSizes, *, on_demand: bool = False) -> StepGraphs:
        """Return graphs of these sizes, still to be captured; plans with a `graph_mode` replay them."""
        if self.drafts is not None:
            self._builder.warm_up()
        self.graphs = StepGraphs(
            self.model,
            self._backends,
            self._builder,
            sizes=sizes,
            max_seqs=self._max_num_seqs,
            max_blocks=self._max_blocks,
            ubatches=self.ubatches,
            passes=self.drafts,
            on_demand=on_demand,
        )
        return self.graphs

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers with hidden states that the draft model reads."""
        return () if self.drafts is None else self.drafts.model.aux_layers

    @property
    def capturing(self) -> bool:
        """Whether a graph is captured on demand now. From any thread."""
        return self.graphs is not None and self.graphs.capturing

    def limit_all2all(self, comm_sms: int | None) -> None:
        """Set the SMs of the all-to-alls beside ubatches; discard ubatched graphs, which keep their own limit."""
        assert self.ubatches is not None, "there are no ubatches"
        self.ubatches.comm_sms = comm_sms
        if self.graphs is not None:
            self.graphs.discard_ubatches()

    def drop_ubatches(self) -> None:
        """Free the ubatches: no step will be cut."""
        self.ubatches = None
        if self.graphs is not None:
            self.graphs.drop_ubatches()

    def close(self) -> None:
        """Discard the captured forwards; call it before their process group is left."""
        if self.graphs is not None:
            self.graphs.close()

    def _graph_key(self, plan: StepPlan) -> GraphKey | None:
        """Return the graph that the step replays; it and those of a draft model are captured by now. None: eager."""
        if self.graphs is None:
            assert not plan.graph_mode, "a step replays graphs, but there are none"
            return None
        return self.graphs.require_step(plan)

    def _plan(self, batch: ForwardBatch, plan: StepPlan, key: GraphKey | None) -> Callable[[], Ran]:
        """Plan attention and return the function that runs the forward."""
        if key is not None:
            assert self.graphs is not None
            return partial(self._replay, self.graphs.plan(batch, key), batch)
        if not plan.ubatch:
            self._attention.plan(batch)
            if self._linear_attention is not None:
                self._linear_attention.plan(batch)
            return partial(self._forward, self.model, batch)
        assert self.ubatches is not None, "a step is cut, but there are no ubatches"
        self.ubatches.plan(batch)
        return partial(self._forward, self.ubatches, batch)

    def _forward(self, model: DecoderLM | UBatchWrapper, batch: ForwardBatch) -> Ran:
        after = dict.fromkeys(self.aux_layers, _NO_HIDDEN)
        self._expert_load.begin()
        hidden_TD = model.forward(batch, hidden_after=after) if after else model.forward(batch)
        self._expert_load.finish()
        return hidden_TD, batch_logits(self.model, hidden_TD, batch), after

    def _replay(self, graph: ForwardGraph, batch: ForwardBatch) -> Ran:
        graph.graph.replay()
        logits_LV = graph.logits(batch)
        if logits_LV is None:
            logits_LV = batch_logits(self.model, graph.hidden_TD, batch)
        return graph.hidden_TD, logits_LV, graph.hidden_after

    def _sample(
        self,
        logits_LV: torch.Tensor,
        batch: ForwardBatch,
        mask: PendingBitmask | None,
        draft_token_ids_L: np.ndarray | None,
    ) -> SampledTokens:
        allowed = None if mask is None else mask.wait()
        return self._sampler.sample(
            logits_LV,
            batch.sampling_rows_cpu,
            batch.sampling_positions_cpu,
            allowed,
            draft_token_ids_L,
        )


def _raise(error: Exception, *_: Any) -> StepOutput:
    raise error
