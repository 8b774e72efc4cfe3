"""The forwards of a draft model behind each step: drafts for the next step. Knows nothing of acceptance.

A state at position p and the token at p + 1 give a draft of the token at p + 2. The first pass runs over all rows of
the step, so that the draft model has K and V of every token; each further pass runs over one row a sequence. Experts
are collective: every rank runs the passes of the plan, with sequences or without, and so do ranks that failed.

T rows (padding included), L rows with logits, S sequences with new tokens, A sequences that go on in a pass, D hidden.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from kernels.attention.base import Attention
from workers.kv_cache.manager import KVCacheManager
from workers.specs.model import ModelConfig
from workers.speculation.speculator import Speculator
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch
from workers.step.step_output import count_verified
from workers.step.step_sync import StepPlan

NO_TOKEN = -1
"""In place of a draft behind the memory of its sequence."""


class DraftModel(Protocol):
    """A head for multi-token prediction, or an EAGLE-3 draft model."""

    config: ModelConfig
    aux_layers: tuple[int, ...]

    def read_target(
        self, hidden_TD: torch.Tensor, hidden_after: dict[int, torch.Tensor]
    ) -> torch.Tensor: ...
    def forward(self, batch: ForwardBatch, states_TD: torch.Tensor) -> torch.Tensor: ...
    def draft(self, states_LD: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class LastRows:
    """The last row of each sequence with new tokens, behind which its drafts follow.

    seqs       indices in the ScheduledBatch
    logits     indices among the rows with logits
    rows       rows of the forward
    table      rows of the InputBatch
    positions  of the states
    ends       positions that the sequence has memory for
    """

    seqs: np.ndarray
    logits: np.ndarray
    rows: np.ndarray
    table: np.ndarray
    positions: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(
        cls,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        drawn_L: np.ndarray,
        counts_B: np.ndarray | None,
        limit: int,
    ) -> "LastRows":
        """Return those of a step with these draws, see `DraftPasses.run`; no position may be `limit` or more."""
        seqs = np.flatnonzero(scheduled.num_logits)
        num_logits = scheduled.num_logits[seqs]
        counts = num_logits
        if scheduled.draft_token_ids is not None:
            counts_B = count_verified(scheduled, drawn_L) if counts_B is None else counts_B
            counts = counts_B[seqs]
        logits = num_logits.cumsum() - num_logits + counts - 1
        behind = num_logits - counts
        rows = batch.query_start_loc_cpu[seqs + 1] - 1 - behind
        found = [scheduled.seqs[index] for index in seqs.tolist()]
        return cls(
            seqs=seqs,
            logits=logits,
            rows=rows.astype(np.int64),
            table=np.array([seq.row for seq in found], dtype=np.int64),
            positions=batch.seq_lens_cpu[seqs].astype(np.int64) - 1 - behind,
            ends=np.array([min(seq.capacity, limit) for seq in found], dtype=np.int64),
        )


def draft_vote(speculator: Speculator | None, batch: ScheduledBatch | None) -> dict[str, int]:
    """Return the fields of a rank's vote for the passes of its draft model behind the next step."""
    if speculator is None or batch is None or not speculator.uses_model:
        return {}
    steps = speculator.draft_steps(part.seq for part in batch.parts if part.num_logits)
    return {"draft_steps": steps, "draft_rows": int(np.count_nonzero(batch.num_logits))}


class DraftPasses:
    """Runs a draft model with an attention of its own, over the KV blocks of the target's layers."""

    def __init__(
        self,
        model: DraftModel,
        attention: Attention,
        table: InputBatch,
        cache: KVCacheManager,
        device: torch.device,
    ):
        self.model = model
        self._attention = attention
        self._table, self._cache, self._device = table, cache, device
        self._limit = table.token_ids.shape[1]

    def run(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        plan: StepPlan,
        states_TD: torch.Tensor,
        token_L: torch.Tensor | None,
        counts_B: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return drafts int64 [S, K], NO_TOKEN where there is none, of the sequences with new tokens. Collective.

        states    of `read_target`, for the rows of `batch`
        token_L   the drawn tokens; None: this rank failed, and runs along without sequences
        counts_B  how many draws of each sequence count; None: those that equal its drafts, and one more
        """
        failed = token_L is None
        drawn_L = torch.zeros_like(batch.logits_indices) if token_L is None else token_L
        self._attention.plan(batch)
        first = replace(batch, input_ids=self._next_tokens(scheduled, batch, drawn_L))
        states_TD = self.model.forward(first, states_TD)
        last = LastRows.of(scheduled, batch, drawn_L.cpu().numpy(), counts_B, self._limit)
        depth = max(1, plan.draft_steps)
        drafts_SK = torch.full((len(last.seqs), depth), NO_TOKEN, device=self._device)
        alive = np.arange(0 if failed else len(last.seqs))
        states_AD = states_TD[self._there(last.rows[alive])]
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

    def _next_tokens(
        self, scheduled: ScheduledBatch, batch: ForwardBatch, drawn_L: torch.Tensor
    ) -> torch.Tensor:
        """Return the token that follows each row: a token of the sequence, a draft, or the token just drawn."""
        ids_T = batch.input_ids.roll(-1)
        prompts = np.flatnonzero(scheduled.num_logits == 0)
        if len(prompts):
            rows = batch.query_start_loc_cpu[prompts + 1].astype(np.int64) - 1
            ends = batch.seq_lens_cpu[prompts].tolist()
            tokens = [
                scheduled.seqs[seq].token_ids[end]
                for seq, end in zip(prompts.tolist(), ends, strict=True)
            ]
            ids_T[self._there(rows)] = self._there(np.array(tokens, dtype=np.int64))
        ids_T[batch.logits_indices] = drawn_L
        return ids_T.clamp_(min=0)

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
        batch = self._decodes(table, positions, token_A, num_rows)
        padded_TD = states_AD.new_zeros(num_rows, states_AD.shape[1])
        padded_TD[:count] = states_AD
        self._attention.plan(batch)
        return self.model.forward(batch, padded_TD)[:count]

    def _decodes(
        self, table: np.ndarray, positions: np.ndarray, token_A: torch.Tensor, num_rows: int
    ) -> ForwardBatch:
        """Return a batch of one row for each of these sequences, padded to `num_rows` rows."""
        count = len(table)
        ids_T, positions_T = torch.zeros(2, num_rows, dtype=torch.int64, device=self._device)
        ids_T[:count] = token_A
        positions_T[:count] = self._there(positions)
        longest = int(positions.max(initial=0)) + 1
        fields = self._cache.fields(table, table, positions, longest)
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
            logits_indices=nothing,
            sampling_rows=nothing,
            sampling_rows_cpu=table[:0],
            sampling_positions_cpu=positions[:0],
            **own,
        )

    def _there(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
