"""Logits processors: allowed tokens, bad words, min_tokens, logit_bias and penalties, in this order.

The order is vLLM's. They change float32 logits in place, before temperature, and apply to greedy rows too. Knows
nothing of the model or of grammars.

B rows, V vocabulary, N single logits, P penalised rows, S slots, L positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.sampling.bad_words import BadWords, BadWordsTable
from workers.sampling.penalties import PenalisedRows, Penalties
from workers.sampling.token_bitmask import FORBIDDEN, TokenBitmask, pack_tokens
from workers.sampling.verified_rows import VerifiedRows
from workers.wire.request import SamplingParams

# By slot: int64 token ids, and a number for each.
_BySlot = dict[int, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _LogitEntries:
    """Single logits of a batch, on the host: token ids_N[n] of row rows_N[n], and a number for it."""

    rows_N: np.ndarray
    ids_N: np.ndarray
    values_N: np.ndarray

    @classmethod
    def gather(cls, slots: list[int], by_slot: _BySlot) -> "_LogitEntries | None":
        """Return the entries of a batch with rows in `slots`; None if there are none."""
        found = [(row, *by_slot[slot]) for row, slot in enumerate(slots) if slot in by_slot]
        if not found:
            return None
        rows, ids, values = zip(*found, strict=True)
        return cls(
            np.repeat(rows, [len(of_row) for of_row in ids]),
            np.concatenate(ids),
            np.concatenate(values),
        )


@dataclass(frozen=True)
class BatchProcessors:
    """Processors of the rows of a batch; they change only with the rows.

    stops  tokens that end a row, with the first position at which they may be drawn
    bias   numbers that are added
    """

    allowed: TokenBitmask | None
    bad_words: BadWords | None
    stops: _LogitEntries | None
    bias: _LogitEntries | None
    penalties: PenalisedRows | None


class LogitsProcessors:
    """Processors of the running sequences by slot, so that a step only looks them up."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._device = device
        self._on_host = device.type == "cpu"
        self._penalties = Penalties(max_num_seqs, vocab_size, device)
        self._bad_words = BadWordsTable(vocab_size)
        self._allowed: dict[int, np.ndarray] = {}  # by slot: words of a bitmask
        self._bias: _BySlot = {}
        self._stops: _BySlot = {}
        self._used: set[int] = set()  # slots with any processor, until another sequence moves in
        self._last_key: bytes | None = None
        self._last: BatchProcessors | None = None

    def set(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """A sequence with the output so far moves into `slot`."""
        used = (
            bool(params.min_tokens or params.logit_bias or params.bad_words_ids)
            or params.allowed_token_ids is not None
            or params.has_penalties
        )
        if not used and slot not in self._used:
            return
        self._last_key = None
        (self._used.add if used else self._used.discard)(slot)
        self._penalties.set(slot, params, prompt, output)
        self._bad_words.set(slot, params.bad_words_ids, len(prompt))
        self._allowed.pop(slot, None)
        if params.allowed_token_ids is not None:
            self._allowed[slot] = pack_tokens(params.allowed_token_ids, self._vocab_size)
        self._put(self._bias, slot, dict(params.logit_bias))
        may_stop_at = len(prompt) + params.min_tokens
        stops = params.stop_token_ids if params.min_tokens else ()
        self._put(self._stops, slot, dict.fromkeys(stops, may_stop_at))

    def needs_last_token(self, params: SamplingParams) -> bool:
        """Return whether `apply` reads the last token of a sequence with these parameters on the host."""
        reads_words = any(len(word) > 1 for word in params.bad_words_ids)
        return reads_words or (self._on_host and params.has_penalties)

    def any_of(self, slots_B: np.ndarray) -> bool:
        """Return whether a batch with rows in `slots_B` has processors."""
        return bool(self._used) and not self._used.isdisjoint(slots_B.tolist())

    def batch(self, slots_B: np.ndarray) -> BatchProcessors | None:
        """Return the processors of a batch with rows in `slots_B`; None if there are none."""
        if not self._used:
            return None
        key = slots_B.tobytes()
        if key != self._last_key:  # one set of rows usually decodes for many steps
            found = self._gather(slots_B.tolist()) if self.any_of(slots_B) else None
            self._last_key, self._last = key, found
        return self._last

    def apply(
        self,
        logits_BV: torch.Tensor,
        processors: BatchProcessors,
        positions_B: np.ndarray,
        token_ids_SL: np.ndarray,
        drafts: VerifiedRows | None = None,
    ) -> None:
        """Change the logits in place.

        positions_B   position of each row's new token
        token_ids_SL  tokens of each slot, of which those before that position are read
        drafts        of rows that draw behind drafts; None: each slot comes once
        """
        device = logits_BV.device
        if processors.allowed is not None:
            processors.allowed.apply(logits_BV)
        if processors.bad_words is not None:
            _forbid(logits_BV, *processors.bad_words.find(positions_B, token_ids_SL))
        stops, bias, penalised = processors.stops, processors.bias, processors.penalties
        if stops is not None:
            too_early_N = positions_B[stops.rows_N] < stops.values_N
            _forbid_stops(logits_BV, stops.rows_N[too_early_N], stops.ids_N[too_early_N])
        if bias is not None:
            index = to_device(bias.rows_N, device), to_device(bias.ids_N, device)
            logits_BV[index] += to_device(bias.values_N, device)
        if penalised is not None and drafts is not None:
            self._penalise_behind_drafts(logits_BV, penalised, positions_B, token_ids_SL, drafts)
        elif penalised is not None:
            self._penalise(logits_BV, penalised, positions_B, token_ids_SL)

    def count_tokens(
        self,
        token_B: torch.Tensor,
        processors: BatchProcessors,
        drafts: VerifiedRows | None = None,
    ) -> None:
        """Count the new tokens of the batch for the penalties, without draws behind a wrong draft."""
        if processors.penalties is not None:
            counts_B = None if drafts is None else drafts.counting(token_B)
            self._penalties.count(token_B, processors.penalties, counts_B)

    def _penalise(
        self,
        logits_BV: torch.Tensor,
        penalised: PenalisedRows,
        positions_B: np.ndarray,
        token_ids_SL: np.ndarray,
    ) -> None:
        if not self._on_host:
            self._penalties.apply_everywhere(logits_BV, penalised)
            return
        known_PL = token_ids_SL[penalised.slots, : positions_B[penalised.rows].max()]
        # Behind the tokens of a shorter row, the mark of an earlier pending token may remain.
        token_ids_PL = torch.from_numpy(known_PL).to(torch.int64).clamp_(min=0)
        self._penalties.apply(logits_BV, penalised, token_ids_PL)

    def _penalise_behind_drafts(
        self,
        logits_BV: torch.Tensor,
        penalised: PenalisedRows,
        positions_B: np.ndarray,
        token_ids_SL: np.ndarray,
        drafts: VerifiedRows,
    ) -> None:
        """Penalise the rows by depth: a row's counts include the drafts before it, which are taken out at the end."""
        draft_B, times_B = to_device(drafts.draft_B, self._device), drafts.times(self._device)
        depth_P = drafts.depth_B[penalised.rows]
        for depth in range(depth_P.max() + 1):
            rows = penalised.select(np.flatnonzero(depth_P == depth))
            self._penalise(logits_BV, rows, positions_B, token_ids_SL)
            self._penalties.count(draft_B, rows, times_B)
        self._penalties.count(draft_B, penalised, -times_B)

    def _gather(self, slots: list[int]) -> BatchProcessors:
        return BatchProcessors(
            self._gather_allowed(slots),
            self._bad_words.batch(slots),
            _LogitEntries.gather(slots, self._stops),
            _LogitEntries.gather(slots, self._bias),
            self._penalties.rows(slots),
        )

    def _gather_allowed(self, slots: list[int]) -> TokenBitmask | None:
        rows = [row for row, slot in enumerate(slots) if slot in self._allowed]
        if not rows:
            return None
        words_GW = np.stack([self._allowed[slots[row]] for row in rows])
        rows_G = np.array(rows, dtype=np.int64)
        return TokenBitmask(to_device(rows_G, self._device), to_device(words_GW, self._device))

    def _put(self, by_slot: _BySlot, slot: int, numbers: dict[int, float]) -> None:
        """Keep a number for each token; ids beyond the vocabulary are left out, the model cannot draw them."""
        known = {token: n for token, n in numbers.items() if 0 <= token < self._vocab_size}
        by_slot.pop(slot, None)
        if known:
            by_slot[slot] = (
                np.fromiter(known, dtype=np.int64),
                np.fromiter(known.values(), dtype=np.float32),
            )


def _forbid(logits_BV: torch.Tensor, rows_M: np.ndarray, ids_M: np.ndarray) -> None:
    if len(rows_M):
        index = to_device(rows_M, logits_BV.device), to_device(ids_M, logits_BV.device)
        # Assigning a number by index would wait for the device.
        logits_BV[index] = logits_BV.new_full((len(rows_M),), FORBIDDEN)


def _forbid_stops(logits_BV: torch.Tensor, rows_M: np.ndarray, ids_M: np.ndarray) -> None:
    """Forbid tokens, except in rows that would have none left: a grammar at its end allows only the end."""
    if not len(rows_M):
        return
    index = to_device(rows_M, logits_BV.device), to_device(ids_M, logits_BV.device)
    before_M = logits_BV[index]
    logits_BV[index] = torch.full_like(before_M, FORBIDDEN)
    empty_B = logits_BV.amax(dim=-1) == FORBIDDEN
    logits_BV[index] = torch.where(empty_B[index[0]], before_M, FORBIDDEN)
