"""The forwards of a draft model behind each step: drafts for the next step. Knows nothing of acceptance.

A state at position p and the token at p + 1 give a draft of the token at p + 2. The first pass runs over all rows of
the step, so that the draft model has K and V of every token; each further pass runs over one row a sequence. Experts
are collective: every rank runs the passes of the plan, with sequences or without, and so do ranks that failed.

T rows (padding included), L rows with logits, S sequences with new tokens, A sequences that go on in a pass, D hidden.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.attention.base import Attention, GraphForm
from workers.kv_cache.manager import KVCacheManager
from workers.runner.batch_builder import ForwardBatchBuilder
from workers.runner.draft_graphs import NO_TOKEN, DraftGraphs, DraftModel, TargetStates
from workers.runner.draft_rows import DraftRows, LastRows, following, following_batch, next_tokens
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.speculation.speculator import Speculator
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch
from workers.step.step_sync import StepPlan


def draft_vote(
    speculator: Speculator | None, batch: ScheduledBatch | None, step: int
) -> dict[str, int]:
    """Return the fields of a rank's vote for drafts: of the next step, and by a draft model behind this one, `step`."""
    if speculator is None or batch is None:
        return {}
    rows = int(np.count_nonzero(batch.num_logits))
    found = {
        "draft_rows": rows,
        "verifies": int(batch.num_verify > 0),
        **speculator.vote(num_decodes=rows),
    }
    if speculator.uses_model:
        seqs = [part.seq for part in batch.parts if part.num_logits]
        reads, steps = speculator.wish(seqs, step, prompts=batch.prefill_tokens > 0)
        found |= {"draft_reads": int(reads), "draft_steps": steps}
    return found


def enter_plan(speculator: Speculator | None, batch: ScheduledBatch, plan: StepPlan) -> None:
    """Enter the plan of a step in the speculation of a rank, before its launch."""
    if speculator is None:
        return
    speculator.follow(plan)
    if speculator.uses_model and not plan.draft_reads:
        speculator.left_out(batch.seqs)


class Drafted(NamedTuple):
    """Drafts int64 [S, K] of the sequences with new tokens, in `rows`; NO_TOKEN where there is none."""

    rows: DraftRows
    drafts_SK: torch.Tensor


class DraftPasses:
    """Runs a draft model with an attention of its own, over the KV blocks of the target's layers.

    num_drafts   most tokens that it drafts of a sequence
    last_tokens  what `ForwardBatch.resolved` reads; set by the runner
    graphs       captured passes; None: all passes run eagerly
    """

    def __init__(
        self,
        model: DraftModel,
        attention: Attention,
        table: InputBatch,
        cache: KVCacheManager,
        device: torch.device,
        num_drafts: int,
    ):
        self.model, self.attention, self.cache = model, attention, cache
        self.num_drafts = num_drafts
        self.last_tokens: torch.Tensor | None = None
        self.graphs: DraftGraphs | None = None
        self._device = device
        self._limit = table.token_ids.shape[1]

    def capture(
        self,
        sizes: GraphSizes,
        target: TargetStates,
        replay: Callable[[GraphKey, GraphForm], None],
        builder: ForwardBatchBuilder,
        max_seqs: int,
    ) -> DraftGraphs:
        """Run captured passes from now on, see DraftGraphs; return what to capture."""
        self.graphs = DraftGraphs(
            self.model,
            self.attention,
            self.cache,
            sizes,
            target,
            replay,
            last_tokens=self.last_tokens,
            max_tokens=builder.max_num_tokens,
            max_seqs=max_seqs,
        )
        return self.graphs

    def reads_drafts(self, plan: StepPlan, counts_B: np.ndarray | None) -> bool:
        """Return whether `run` counts draws on the host: then the drafts of its batch are to be tokens."""
        further = None if self.graphs is None else self.graphs.keys_of(plan)[1]
        return further is None and counts_B is None and plan.draft_steps > 0

    def run(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        plan: StepPlan,
        target: TargetStates,
        token_L: torch.Tensor | None,
        counts_B: np.ndarray | None = None,
    ) -> Drafted:
        """Draft tokens of the sequences with new tokens. Collective.

        scheduled its drafts are tokens where `reads_drafts`
        target    of the forward of `batch`; those of its graph, if it replayed one
        token_L   the drawn tokens; None: this rank failed, and runs along without sequences
        counts_B  how many draws of each sequence count; None: those that equal its drafts, and one more
        """
        drawn_L = torch.zeros_like(batch.logits_indices) if token_L is None else token_L
        drafting = ScheduledBatch.of([]) if token_L is None else scheduled
        follow_T = following(scheduled, batch, batch.num_rows)
        rows, graphs = DraftRows.of(drafting, batch, self._limit), self.graphs
        first, further = (None, None) if graphs is None else graphs.keys_of(plan)
        if graphs is not None:
            graphs.take_draws(drawn_L)
        if graphs is not None and first is not None:
            states_TD = graphs.run_first(first, batch, follow_T)
        else:
            states_TD = self._first(batch, target, follow_T, drawn_L)
        if graphs is not None and further is not None:
            if first is None:
                graphs.take_states(states_TD)
            return Drafted(rows, graphs.run_further(further, drafting, rows, counts_B))
        if not plan.draft_steps:
            return Drafted(rows, drawn_L.new_empty(len(rows.seqs), 0))
        counts_S = rows.counts(drafting, drawn_L.cpu().numpy(), counts_B)
        return Drafted(rows, self._further(rows.last(counts_S), plan, states_TD))

    def _first(
        self,
        batch: ForwardBatch,
        target: TargetStates,
        follow_T: np.ndarray,
        drawn_L: torch.Tensor,
    ) -> torch.Tensor:
        """Return the states of all rows."""
        drawn_L = drawn_L if len(drawn_L) else batch.input_ids.new_zeros(1)
        states_TD = self.model.read_target(target.hidden_TD, target.hidden_after)
        ids_T = batch.resolved(self.last_tokens).input_ids
        there_T = self._there(follow_T)
        ids_T = next_tokens(ids_T, there_T, drawn_L)
        self.attention.plan(batch)
        return self.model.forward(following_batch(batch, ids_T, there_T), states_TD)

    def _further(self, last: LastRows, plan: StepPlan, states_TD: torch.Tensor) -> torch.Tensor:
        """Return the drafts behind the last rows."""
        depth = plan.draft_steps
        drafts_SK = torch.full((len(last.seqs), depth), NO_TOKEN, device=self._device)
        alive = np.arange(len(last.seqs))
        states_AD = states_TD[self._there(last.rows)]
        if len(alive):
            drafts_SK[:, 0] = self.model.draft(states_AD)
        for k in range(1, depth):
            goes_on = last.positions[alive] + k < last.ends[alive]
            states_AD = states_AD[self._there(np.flatnonzero(goes_on))]
            alive = alive[goes_on]
            index_A = self._there(alive)
            token_A = drafts_SK[index_A, k - 1]
            states_AD = self._pass(last, alive, k, token_A, states_AD, plan.draft_rows)
            if len(alive):
                drafts_SK[index_A, k] = self.model.draft(states_AD)
        return drafts_SK

    def _pass(
        self,
        last: LastRows,
        alive: np.ndarray,
        k: int,
        token_A: torch.Tensor,
        states_AD: torch.Tensor,
        num_rows: int,
    ) -> torch.Tensor:
        """Return the states of the next depth, after a pass of `num_rows` rows."""
        count = len(alive)
        if not count and not self.model.config.num_moe_layers:
            return states_AD
        assert count <= num_rows, f"{count} sequences do not fit in {num_rows} rows"
        table, positions = last.table[alive], last.positions[alive] + k
        batch = self._decodes(table, positions, last.deltas[alive], token_A, num_rows)
        padded_TD = states_AD.new_zeros(num_rows, states_AD.shape[1])
        padded_TD[:count] = states_AD
        self.attention.plan(batch)
        return self.model.forward(batch, padded_TD)[:count]

    def _decodes(
        self,
        table: np.ndarray,
        positions: np.ndarray,
        deltas: np.ndarray,
        token_A: torch.Tensor,
        num_rows: int,
    ) -> ForwardBatch:
        """Return a batch of one row for each of these sequences, padded to `num_rows` rows."""
        count = len(table)
        found = torch.zeros(3, num_rows, dtype=torch.int64, device=self._device)
        ids_T, positions_T, rope_T = found
        ids_T[:count] = token_A
        found[1:, :count] = self._there(np.stack((positions, positions + deltas)))
        longest = int(positions.max(initial=0)) + 1
        fields = self.cache.fields(table, table, positions, longest)
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        own: dict[str, Any] = {
            name: self._there(fields[name]) for name in ("block_table", "slot_mapping")
        }
        return ForwardBatch(
            num_tokens=count,
            num_token_non_padded=count,
            num_seqs=count,
            num_single_rows=count,
            query_start_loc_cpu=np.arange(count + 1, dtype=np.int32),
            seq_lens_cpu=(positions + 1).astype(np.int32),
            input_ids=ids_T,
            positions=positions_T,
            rope_positions=rope_T[:, None].expand(-1, 3),
            logits_indices=nothing,
            sampling_rows=nothing,
            sampling_rows_cpu=table[:0],
            sampling_positions_cpu=positions[:0],
            **own,
        )

    def _there(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
