"""What one rank votes before a step, and its form as a row of int64. Knows nothing of plans."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from workers.step.draft_budget import GAIN_BITS, PARTS

HEALTHY = 0
WORD_BITS = 62
"""Bits of an int64 that hold fields of a vote that share it."""


def _bits(count: int) -> Any:
    """Return a field of a Vote that takes `count` bits of its row."""
    return field(default=0, metadata={"bits": count})


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One rank's row. Fields without bits are an int64 each, in this order; others share words behind them.

    The rows of 8 ranks fit in one datagram of an Ethernet of 1,500 bytes.

    num_tokens    tokens that the rank scheduled; 0 if it is idle
    decode_rows   rows of the smallest DECODE graph that fits this rank's part of the step, 0 if none fits;
                  every graph fits a rank without tokens
    verify_rows   rows of the smallest VERIFY graph that fits, 0 if none fits
    mixed_rows    rows of the smallest MIXED graph that fits, 0 if none fits
    wants_ubatch  the rank gains from two ubatches
    prefill_tokens  tokens of prompts among num_tokens
    prefill_cap   most prompt tokens that a rank may run in the next step, because this rank decodes in it; 0 if it does
                  not
    draft_reads   a draft model is to read the step, by a pass over all rows: later drafts need K and V of all tokens
    draft_steps   tokens that it is to draft of each sequence behind the step
    draft_rows    sequences with new tokens, of which a draft model is to draft tokens and which decode in the next step
    verifies      the step verifies drafts
    drafts        drafts that the next step could verify, as many as are likely enough to survive
    draft_gains   their mean survival, cut into PARTS parts with the most likely ones first, GAIN_BITS bits each
    draft_passes  tokens that a draft model would draft of each sequence behind steps with drafts
    draft_factor  time of a step with drafts over the time that its rows take, in units of 1 / FACTOR_UNIT
    draft_row_share  share of a step of one row that each further row takes, in units of 1 / SHARE_UNIT
    move          number of the move of experts that the rank stages; 0 without one
    move_staged   layers of the move that the rank has staged, those that are committed included
    move_cancel   number of a move that the rank wants to be cancelled; 0 without one
    adapter_rows  the step has rows with adapters on the rank
    adapter_slots  slots of the adapters of its running sequences, slot s as bit s - 1
    adapter_wanted  id of an adapter that a waiting sequence needs in a slot; 0 = none
    has_work      requests wait for their turn or run on the rank, scheduled or not
    has_requests  requests are on the rank, also such as wait for images or KV
    health        HEALTHY, or another number: then the group stops with the rank's number and reason
    """

    epoch: int
    step: int
    num_tokens: int = 0
    decode_rows: int = 0
    verify_rows: int = 0
    mixed_rows: int = 0
    wants_ubatch: int = _bits(1)
    prefill_tokens: int = 0
    prefill_cap: int = 0
    draft_reads: int = _bits(1)
    draft_steps: int = _bits(6)
    draft_rows: int = _bits(20)
    verifies: int = _bits(1)
    drafts: int = _bits(20)
    draft_gains: int = _bits(GAIN_BITS * PARTS)
    draft_passes: int = _bits(6)
    draft_factor: int = _bits(12)
    draft_row_share: int = _bits(21)
    move: int = 0
    move_staged: int = 0
    move_cancel: int = 0
    adapter_rows: int = _bits(1)
    adapter_slots: int = 0
    adapter_wanted: int = 0
    has_work: int = _bits(1)
    has_requests: int = _bits(1)
    wants_stop: int = _bits(1)
    health: int = HEALTHY

    def row(self) -> np.ndarray:
        """int64 [NUM_WORDS]."""
        values = self.__dict__
        words = [values[name] for name in _WIDE]
        words += [0] * (NUM_WORDS - len(words))
        for name, word, shift, bits in _NARROW:
            value = values[name]
            if value:
                assert 0 < value < 1 << bits, f"{name} {value} has more than {bits} bits"
                words[word] |= int(value) << shift
        return np.array(words, dtype=np.int64)


def _places(bits: dict[str, int], word: int) -> list[tuple[str, int, int, int]]:
    """Return name, word, shift and bits of fields in a row, from `word` on."""
    found, used = [], 0
    for name in sorted(bits, key=lambda it: -bits[it]):
        if used + bits[name] > WORD_BITS:
            word, used = word + 1, 0
        found.append((name, word, used, bits[name]))
        used += bits[name]
    return found


_WIDE = [it.name for it in fields(Vote) if "bits" not in it.metadata]
_NARROW = _places(
    {it.name: it.metadata["bits"] for it in fields(Vote) if "bits" in it.metadata}, len(_WIDE)
)
_NAMES = [*_WIDE, *(name for name, *_ in _NARROW)]
_WORDS = np.array([*range(len(_WIDE)), *(word for _, word, *_ in _NARROW)])
_SHIFTS = np.array([*[0] * len(_WIDE), *(shift for *_, shift, _ in _NARROW)])
_MASKS = np.array([*[-1] * len(_WIDE), *((1 << bits) - 1 for *_, bits in _NARROW)])
NUM_WORDS = 1 + int(_WORDS.max())


def columns_of(rows: np.ndarray) -> dict[str, list[int]]:
    """Return each field of the votes of all ranks, from int64 [num_ranks, NUM_WORDS]."""
    values = (rows[:, _WORDS] >> _SHIFTS) & _MASKS
    return dict(zip(_NAMES, values.T.tolist(), strict=True))
