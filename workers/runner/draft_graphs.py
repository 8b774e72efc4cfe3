"""The passes of a draft model as CUDA graphs: no launch for each kernel, and no wait for the draws of the step.

A graph of the first pass runs over all rows of a step; one of the further passes drafts K tokens of each sequence, each
from the state and the token before it. How many draws count, positions, slots and lengths are computed in the graph;
attention is planned for the most draws that can count. Knows nothing of captures; see `StepGraphs`.

T rows (padding included), L rows with logits, R sequences (padding included), S without, K drafts, D hidden.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from kernels.attention.base import Attention, GraphAttention, GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.host.host_copy import fill
from workers.kv_cache.manager import KVCacheManager
from workers.runner.draft_rows import IN_SEQUENCE, DraftRows, following_batch, next_tokens
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.specs.model import ModelConfig
from workers.step.forward_batch import ForwardBatch, resolve_pending
from workers.step.scheduled_batch import NEVER_DRAWN, ScheduledBatch
from workers.step.step_sync import GraphMode, StepPlan

NO_TOKEN = -1
"""In place of a draft behind the memory of its sequence."""

# Of a sequence, before its drafts: row with logits, row, position, end, delta, draws that count or 0.
_COLUMNS = 6


class DraftModel(Protocol):
    """A head for multi-token prediction, or an EAGLE-3 draft model."""

    config: ModelConfig
    aux_layers: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def read_target(
        self, hidden_TD: torch.Tensor, hidden_after: dict[int, torch.Tensor]
    ) -> torch.Tensor: ...
    def forward(self, batch: ForwardBatch, states_TD: torch.Tensor) -> torch.Tensor: ...
    def draft(self, states_LD: torch.Tensor) -> torch.Tensor: ...


class TargetStates(NamedTuple):
    """Hidden states of a forward of the target: the last ones, and those after the layers that a draft model reads."""

    hidden_TD: torch.Tensor
    hidden_after: dict[int, torch.Tensor]


class DraftGraphs:
    """What the captured passes read and write, at fixed addresses, and the functions to capture.

    replay      replays the graph of a key in a form
    target      what the graphs of the target write
    sizes       `draft` and `draft_tokens` are those of the further passes; none if the attention cannot be shortened
    last_tokens as of DraftPasses
    max_tokens  rows of a step, with logits or without
    """

    def __init__(
        self,
        model: DraftModel,
        attention: Attention,
        cache: KVCacheManager,
        sizes: GraphSizes,
        target: TargetStates,
        replay: Callable[[GraphKey, GraphForm], None],
        *,
        last_tokens: torch.Tensor | None,
        max_tokens: int,
        max_seqs: int,
    ):
        assert attention.graph, f"{attention.name} has no graphs"
        self._model, self._target, self._sizes, self._replay = model, target, sizes, replay
        self._attention = cast(GraphAttention, attention)
        self._cache, self._last_tokens = cache, last_tokens
        self._attention.reserve_graphs(max(sizes.largest, max_seqs), max_seqs, cache.max_blocks)
        self._width = sizes.draft_tokens
        heads = model.config.attention
        self._three_positions = heads is not None and bool(heads.rope.sections)
        new: dict[str, Any] = {"dtype": torch.int64, "device": model.device}
        columns = _COLUMNS + self._width
        self._follow_T = torch.zeros(sizes.largest, **new)
        self._drawn_L = torch.zeros(max_tokens, **new)
        self._seqs = torch.zeros(1 + max_seqs * columns, **new)  # S, then a row of each sequence
        self._table_RB = torch.zeros(max_seqs, cache.max_blocks, **new)
        self._no_slots_R = torch.full((max_seqs,), -1, **new)
        self._drafts_RK = torch.zeros(max_seqs, max(1, self._width), **new)
        self._states_TD = torch.zeros(
            max_tokens, model.config.hidden_size, dtype=model.dtype, device=model.device
        )

    def keys(self) -> list[GraphKey]:
        """Return the keys of all graphs."""
        steps = self._sizes.whole_steps()
        steps = [key for key in steps if self._captures(key.mode) and not key.adapters]
        first = [key._replace(drafts=1) for key in steps]
        return [*first, *self._sizes.further_passes()]

    def keys_of(self, plan: StepPlan) -> tuple[GraphKey | None, GraphKey | None]:
        """Return the graph of a step's first pass, and that of the further passes; None: they run eagerly."""
        if not plan.draft_reads:
            return None, None
        first = None
        if plan.graph_mode and self._captures(plan.graph_mode):
            first = GraphKey(plan.graph_mode, plan.padded_tokens, drafts=1)
        return first, self._sizes.further_key(plan.draft_rows, plan.draft_steps)

    def _captures(self, mode: GraphMode) -> bool:
        return self._attention.mixed_graph or not mode.takes_several_rows

    def forms(self, key: GraphKey) -> tuple[GraphForm, ...]:
        """Return the forms of attention to capture for a key."""
        if key.mode == GraphMode.DRAFT and key.drafts == 1:
            return (GraphForm.DECODES,)  # has no attention
        if key.mode == GraphMode.VERIFY:
            return (self._attention.drafts_form(key.rows),)
        return self._attention.forms(key.rows, prompts=key.mode.takes_several_rows)

    def run_first(self, key: GraphKey, batch: ForwardBatch, follow_T: np.ndarray) -> torch.Tensor:
        """Run the first pass over the rows of a step; return the states [T, D], until the next first pass.

        follow    of `following`
        """
        form = self.forms(key)[-1]
        if key.mode != GraphMode.VERIFY:
            prompts = key.mode.takes_several_rows
            form = self._attention.form(batch, key.rows, prompts=prompts)
        self._attention.plan_graph(batch, key.rows, form)
        fill(self._follow_T[: key.rows], follow_T)
        self._replay(key, form)
        return self._states_TD[: key.rows]

    def take_draws(self, drawn_L: torch.Tensor) -> None:
        """Copy the drawn tokens to where graphs read them."""
        assert len(drawn_L) <= len(self._drawn_L), (len(drawn_L), len(self._drawn_L))
        self._drawn_L[: len(drawn_L)].copy_(drawn_L)

    def _first(self, batch: ForwardBatch, key: GraphKey) -> None:
        """Run the first pass over all rows of the target's last graph."""
        rows = slice(0, key.rows)
        hidden_TD, hidden_after = self._target
        after = {layer: after_TD[rows] for layer, after_TD in hidden_after.items()}
        states_TD = self._model.read_target(hidden_TD[rows], after)
        # The draws of this step are behind the last row of each sequence, so the last tokens that it read are not used.
        ids_T = batch.resolved(self._last_tokens).input_ids
        follow_T = self._follow_T[rows]
        ids_T = next_tokens(ids_T, follow_T, self._drawn_L)
        states_TD = self._model.forward(following_batch(batch, ids_T, follow_T), states_TD)
        self._states_TD[rows].copy_(states_TD)

    def take_states(self, states_TD: torch.Tensor) -> None:
        """Copy the states of a first pass that ran eagerly."""
        self._states_TD[: len(states_TD)].copy_(states_TD)

    def run_further(
        self,
        key: GraphKey,
        scheduled: ScheduledBatch,
        rows: DraftRows,
        counts_B: np.ndarray | None,
    ) -> torch.Tensor:
        """Run the further passes behind the states of the first; return the drafts as DraftPasses.run."""
        counts_S = None if counts_B is None else counts_B[rows.seqs]
        self._fill(key, rows, rows.drafts(scheduled, self._width), counts_S)
        self._replay(key, self._plan_further(key, rows))
        # A copy, because the next replay may overwrite the drafts before the host has read them.
        return self._drafts_RK[: len(rows.seqs), : key.drafts].clone()

    def _fill(
        self, key: GraphKey, rows: DraftRows, drafts_SK: np.ndarray, counts_S: np.ndarray | None
    ) -> None:
        """Copy what the further passes read of each sequence to the device."""
        num_seqs, columns = len(rows.seqs), _COLUMNS + self._width
        packed = np.zeros(1 + key.rows * columns, dtype=np.int64)
        packed[0] = num_seqs
        table = packed[1:].reshape(key.rows, columns)[:num_seqs]
        table[:, :_COLUMNS] = np.stack(
            (
                *(rows.logits, rows.rows, rows.positions, rows.ends, rows.deltas),
                np.zeros(num_seqs, np.int64) if counts_S is None else counts_S,
            ),
            axis=1,
        )
        table[:, _COLUMNS:] = drafts_SK
        fill(self._seqs[: len(packed)], packed)

    def _plan_further(self, key: GraphKey, rows: DraftRows) -> GraphForm:
        """Plan attention for the most draws that can count; return the form to replay."""
        if key.drafts == 1:
            return self.forms(key)[0]
        most = rows.positions + rows.num_logits - 1 + key.drafts
        batch = self._decodes(rows.table, np.minimum(most, rows.ends).clip(min=1))
        form = self._attention.form(batch, key.rows, prompts=False)
        self._attention.plan_graph(batch, key.rows, form)
        return form

    def _decodes(self, table: np.ndarray, lens: np.ndarray) -> AttentionBatch:
        """Return decodes of the last of `lens` tokens in these rows of the InputBatch; K and V are not written.

        Their blocks come to where graphs read them.
        """
        count = len(table)
        fields = self._cache.fields(table, table, lens - 1, int(lens.max(initial=1)))
        blocks = fields["block_table"]
        block_table = self._table_RB[:count, : blocks.shape[1]]
        fill(block_table, blocks)
        return AttentionBatch(
            num_tokens=count,
            num_seqs=count,
            num_single_rows=count,
            query_start_loc_cpu=np.arange(count + 1, dtype=np.int32),
            seq_lens_cpu=lens.astype(np.int32),
            block_table=block_table,
            slot_mapping=self._no_slots_R[:count],
        )

    def _further(self, key: GraphKey) -> None:
        """Draft `key.drafts` tokens of each sequence."""
        num_rows = key.rows
        columns = _COLUMNS + self._width
        table = self._seqs[1 : 1 + num_rows * columns].view(num_rows, columns)
        logits_R, rows_R, positions_R, ends_R, deltas_R, counts_R = table[:, :_COLUMNS].unbind(1)
        counts_R = torch.where(counts_R > 0, counts_R, self._count(logits_R, table[:, _COLUMNS:]))
        positions_R = positions_R + counts_R - 1
        states_RD = self._states_TD.index_select(0, rows_R + counts_R - 1)
        token_R = self._model.draft(states_RD)
        self._drafts_RK[:num_rows, 0] = token_R
        for k in range(1, key.drafts):
            alive_R = positions_R + k < ends_R
            states_RD = self._pass(positions_R + k, ends_R, deltas_R, token_R, states_RD)
            token_R = self._model.draft(states_RD)
            self._drafts_RK[:num_rows, k] = torch.where(alive_R, token_R, NO_TOKEN)

    def _count(self, logits_R: torch.Tensor, drafts_RK: torch.Tensor) -> torch.Tensor:
        """Return how many draws of each sequence count, from the index of its first: int64 [R]."""
        place_K = torch.arange(self._width, device=logits_R.device)
        index_RK = (logits_R[:, None] + place_K).clamp_(max=len(self._drawn_L) - 1)
        drawn_RK = self._drawn_L.index_select(0, index_RK.flatten()).view_as(drafts_RK)
        if self._last_tokens is not None:
            flat = resolve_pending(drafts_RK.flatten(), self._last_tokens)
            drafts_RK = flat.view_as(drafts_RK)
        return (drawn_RK == drafts_RK).to(torch.int64).cumprod(1).sum(1) + 1

    def _pass(
        self,
        position_R: torch.Tensor,
        ends_R: torch.Tensor,
        deltas_R: torch.Tensor,
        token_R: torch.Tensor,
        states_RD: torch.Tensor,
    ) -> torch.Tensor:
        """Return the states at these positions, of the drafts that follow them and the states before."""
        num_rows, size = len(token_R), self._cache.block_size
        alive_R = position_R < ends_R
        position_R = torch.where(alive_R, position_R, 0)
        blocks_R = self._table_RB[:num_rows].gather(1, (position_R // size)[:, None])[:, 0]
        slots_R = torch.where(alive_R, blocks_R * size + position_R % size, -1)
        # A sequence without memory for the token attends to its first token alone; padding has no keys.
        is_seq_R = torch.arange(num_rows, device=token_R.device) < self._seqs[0]
        lens_R = torch.where(is_seq_R, position_R + 1, 0)
        self._attention.shorten(lens_R.to(torch.int32), slots_R)
        batch = self._batch(token_R, position_R, deltas_R)
        return self._model.forward(batch, states_RD)

    def _batch(
        self, token_R: torch.Tensor, position_R: torch.Tensor, deltas_R: torch.Tensor
    ) -> ForwardBatch:
        """Return the batch of a pass as the layers read it; the plan of attention has the rest."""
        rope_R3 = None
        if self._three_positions:
            rope_R3 = (position_R + deltas_R).clamp_(min=0)[:, None].expand(-1, 3)
        num_rows, nothing = len(token_R), torch.empty(0, dtype=torch.int64, device=token_R.device)
        no_array = np.zeros(0, dtype=np.int64)
        return ForwardBatch(
            num_tokens=num_rows,
            num_token_non_padded=self._seqs[:1],
            num_seqs=num_rows,
            num_single_rows=num_rows,
            query_start_loc_cpu=no_array,
            seq_lens_cpu=no_array,
            input_ids=token_R,
            positions=position_R,
            rope_positions=rope_R3,
            block_table=nothing,
            slot_mapping=nothing,
            logits_indices=nothing,
            sampling_rows=nothing,
            sampling_rows_cpu=no_array,
            sampling_positions_cpu=no_array,
        )

    def plan_dummy(self, decodes: AttentionBatch, key: GraphKey, form: GraphForm) -> None:
        """Plan a key for decodes without context: each row of the first pass is followed by the next row's token."""
        self._attention.plan_graph(decodes, key.rows, form)
        self._follow_T.fill_(IN_SEQUENCE)
        rows = np.arange(decodes.num_seqs)
        nothing = np.zeros_like(rows)
        sequences = DraftRows(rows, nothing + 1, rows, rows, *[nothing] * 4)
        drafts_SK = np.full((len(rows), self._width), NEVER_DRAWN)
        if key.mode == GraphMode.DRAFT:
            self._fill(key, sequences, drafts_SK, nothing + 1)

    def run(self, batch: ForwardBatch, key: GraphKey) -> None:
        """Run the pass or the passes of a key. To be captured."""
        if key.mode == GraphMode.DRAFT:
            self._further(key)
        else:
            self._first(batch, key)
