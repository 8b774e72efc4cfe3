"""What changes logits before a token is drawn: a mask, min_tokens, logit_bias, penalties, in this order.

The order is vLLM's. Edits happen in place on float32 logits, before temperature, and hold for greedy rows too.
Knows nothing of the model or of who made the mask.

B rows, G masked rows, W = ceil(V / 32) words, V vocabulary, N single logits, P penalised rows, S slots, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from workers.runner.host_copy import to_device
from workers.sampling.penalties import PenalisedRows, Penalties, has_penalties
from workers.wire.request import SamplingParams

FORBIDDEN = float("-inf")


@dataclass(frozen=True)
class GrammarBitmask:
    """Tokens that some rows of a batch may draw.

    rows_G      int64, where the rows are in the batch
    allowed_GW  int32, bit v % 32 of word v // 32 is 1 when token v is allowed; on any device
    """

    rows_G: torch.Tensor
    allowed_GW: torch.Tensor

    def apply(self, logits_BV: torch.Tensor) -> None:
        """-inf where a token is not allowed; what is NaN stays it."""
        # Added, eight tokens a look-up: filling or choosing by a bool takes ten times as long on a CPU.
        device = logits_BV.device
        bytes_GX = _moved(self.allowed_GW.contiguous(), device).view(torch.uint8)
        penalty_GV = _byte_penalties(device)[bytes_GX.long()].flatten(1)
        logits_BV.index_add_(0, _moved(self.rows_G, device), penalty_GV[:, : logits_BV.shape[1]])


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`, without waiting for it."""
    return tensor if tensor.device == device else to_device(tensor.numpy(), device)


@cache
def _byte_penalties(device: torch.device) -> torch.Tensor:
    """float32 [256, 8]: 0 for the 1 bits of each byte, -inf for its 0 bits, lowest bit first."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, FORBIDDEN).to(device)


# By slot: int64 token ids, and a number for each.
_BySlot = dict[int, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _Entries:
    """Single logits of a batch: token ids_N[n] of row rows_N[n], and a number for it. On the host."""

    rows_N: np.ndarray
    ids_N: np.ndarray
    values_N: np.ndarray

    @classmethod
    def of(cls, slots: list[int], by_slot: _BySlot) -> "_Entries | None":
        found = [(row, *by_slot[slot]) for row, slot in enumerate(slots) if slot in by_slot]
        if not found:
            return None
        rows, ids, values = zip(*found, strict=True)
        return cls(
            np.repeat(rows, [len(of_row) for of_row in ids]),
            np.concatenate(ids),
            np.concatenate(values),
        )

    def where(self, chosen_N: np.ndarray) -> "_Entries":
        """Only those with True."""
        return _Entries(self.rows_N[chosen_N], self.ids_N[chosen_N], self.values_N[chosen_N])

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """To index logits [B, V] with."""
        return to_device(self.rows_N, device), to_device(self.ids_N, device)


@dataclass(frozen=True)
class Edits:
    """What the rows of a batch ask for. Changes only with the rows.

    stops  tokens that end a row; the number is the position from which on they may
    bias   the number is added
    """

    stops: _Entries | None
    bias: _Entries | None
    penalties: PenalisedRows | None


class LogitsProcessors:
    """The edits of running sequences by slot, so that a step only looks them up."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._on_host = device.type == "cpu"
        self._penalties = Penalties(max_num_seqs, vocab_size, device)
        self._bias: _BySlot = {}
        self._stops: _BySlot = {}
        # Slots with any edit, until another sequence moves in.
        self._edited: set[int] = set()
        self._last_key: bytes | None = None
        self._last: Edits | None = None

    def set(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """A sequence moves into `slot`, with what it has generated so far."""
        edited = bool(params.min_tokens or params.logit_bias) or has_penalties(params)
        if not edited and slot not in self._edited:
            return
        self._last_key = None
        (self._edited.add if edited else self._edited.discard)(slot)
        self._penalties.set(slot, params, prompt, output)
        self._put(self._bias, slot, dict(params.logit_bias))
        may_stop_at = len(prompt) + params.min_tokens
        stops = params.stop_token_ids if params.min_tokens else ()
        self._put(self._stops, slot, dict.fromkeys(stops, may_stop_at))

    def reads_tokens(self, params: SamplingParams) -> bool:
        """Whether `apply` needs the last token of a sequence of such parameters on the host."""
        return self._on_host and has_penalties(params)

    def of(self, slots_B: np.ndarray) -> Edits | None:
        """The edits of a batch whose rows are in these slots; None when there are none."""
        if not self._edited:
            return None
        key = slots_B.tobytes()
        if key != self._last_key:  # the same rows decode step after step
            self._last_key, self._last = key, self._gather(slots_B.tolist())
        return self._last

    def apply(
        self,
        logits_BV: torch.Tensor,
        edits: Edits,
        positions_B: np.ndarray,
        token_ids_SL: np.ndarray,
    ) -> None:
        """Edit in place.

        positions_B   the position that each row's new token will have
        token_ids_SL  each slot's tokens, of which those before that position matter
        """
        if edits.stops is not None:
            too_early_N = positions_B[edits.stops.rows_N] < edits.stops.values_N
            if too_early_N.any():
                _forbid(logits_BV, edits.stops.where(too_early_N))
        if edits.bias is not None:
            bias_N = to_device(edits.bias.values_N, logits_BV.device)
            logits_BV[edits.bias.index(logits_BV.device)] += bias_N
        if edits.penalties is not None and self._on_host:
            which = edits.penalties
            known_PL = token_ids_SL[which.slots, : positions_B[which.rows].max()]
            # Behind a shorter row's tokens may stand the mark of one that was pending there.
            token_ids_PL = torch.from_numpy(known_PL).to(torch.int64).clamp_(min=0)
            self._penalties.apply(logits_BV, which, token_ids_PL)
        elif edits.penalties is not None:
            self._penalties.apply_everywhere(logits_BV, edits.penalties)

    def drawn(self, token_B: torch.Tensor, edits: Edits) -> None:
        """The batch got these tokens."""
        if edits.penalties is not None:
            self._penalties.count(token_B, edits.penalties)

    def _gather(self, slots: list[int]) -> Edits | None:
        if self._edited.isdisjoint(slots):
            return None
        return Edits(
            _Entries.of(slots, self._stops),
            _Entries.of(slots, self._bias),
            self._penalties.rows(slots),
        )

    def _put(self, by_slot: _BySlot, slot: int, numbers: dict[int, float]) -> None:
        """Ids beyond the vocabulary are harmless: the model cannot draw them."""
        known = {token: n for token, n in numbers.items() if 0 <= token < self._vocab_size}
        by_slot.pop(slot, None)
        if known:
            by_slot[slot] = (
                np.fromiter(known, dtype=np.int64),
                np.fromiter(known.values(), dtype=np.float32),
            )


def _forbid(logits_BV: torch.Tensor, entries: _Entries) -> None:
    """-inf, but for rows that would have no token left: a grammar that is at its end allows only the end."""
    rows_N, ids_N = entries.index(logits_BV.device)
    before_N = logits_BV[rows_N, ids_N]
    # A number assigned by index would wait for the device.
    logits_BV[rows_N, ids_N] = torch.full_like(before_N, FORBIDDEN)
    empty_B = logits_BV.amax(dim=-1) == FORBIDDEN
    logits_BV[rows_N, ids_N] = torch.where(empty_B[rows_N], before_N, FORBIDDEN)
