"""Draws the next token of every row. Knows nothing of requests, batches of tokens or the model.

The token of a row depends on its logits, its parameters, and one random number hashed from seed and position: never on
other rows, their order, or earlier draws. A draw inverts the cumulative distribution in the order of the vocabulary. In
order of probability, two almost equally likely tokens would change places with the last bit of a logit, and half of the
draws would change with them.

B rows, F rows with a filter, V vocabulary, S sorted candidates of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS
from workers.sampling.token_bitmask import FORBIDDEN
from workers.wire.request import SamplingParams

# Columns of the numbers that are copied to the device together, all float64.
_TEMPERATURE, _GREEDY, _TOP_K, _TOP_P, _MIN_P, _UNIFORM, _NUM_COLUMNS = range(7)
_ALL = 2**31  # top_k of a row without top_k
# Rows filtered at a time: each takes some 70 bytes per token of the vocabulary, 64 rows of 152k tokens 0.7 GB.
_FILTER_ROWS = 64

# Constants of the SplitMix64 generator: the step of its counter and its finaliser.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)


@dataclass(frozen=True)
class Filters:
    """Whether any of the F filtered rows has top_k or top_p; a filter that no row has is not computed.

    max_top_k is the largest top_k: below the size of the vocabulary, no full sort is needed.
    """

    top_k: bool
    top_p: bool
    max_top_k: int


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of `sample_tokens` for B rows, on the host.

    values    float64 [B, 6] (see the columns above), or None if all rows are greedy
    rows      int64 [F], the rows that sample with a filter; None without `filters`
    filters   filters of these rows; None if no row has a filter
    """

    values: np.ndarray | None = None
    rows: np.ndarray | None = None
    filters: Filters | None = None

    @classmethod
    def from_rows(cls, params: Sequence[SamplingParams], positions: np.ndarray) -> "SamplingBatch":
        """Return a batch without slots: positions int [B], one for each of `params`."""
        table = SamplingTable(len(params))
        for row, row_params in enumerate(params):
            table.set(row, row_params)
        return table.batch(np.arange(len(params)), np.asarray(positions))


ALL_GREEDY = SamplingBatch()


class SamplingTable:
    """Parameters of the running sequences by slot, so that a step only gathers them."""

    def __init__(self, max_num_seqs: int):
        self._values = np.zeros((max_num_seqs, _NUM_COLUMNS - 1))
        self._values[:, [_TEMPERATURE, _GREEDY]] = 1.0
        self._greedy = np.ones(max_num_seqs, dtype=bool)
        self._filtered = np.zeros(max_num_seqs, dtype=bool)
        self._keys = np.zeros(max_num_seqs, dtype=np.uint64)
        self._last_key: bytes | None = None
        self._last = ALL_GREEDY

    def set(self, row: int, params: SamplingParams) -> None:
        """A sequence with `params` moves into slot `row`."""
        greedy = params.temperature == 0
        self._greedy[row] = greedy
        self._filtered[row] = not greedy and (
            params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        )
        self._values[row] = (
            1.0 if greedy else params.temperature,
            greedy,
            params.top_k if params.top_k > 0 else _ALL,
            params.top_p,
            params.min_p,
        )
        seed = np.array([params.seed % 2**64], dtype=np.uint64)
        self._keys[row] = _mix(seed)[0]
        self._last_key = None

    def batch(self, rows: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        """Return the parameters of a batch: rows int64 [B] slots, positions int64 [B] of the new tokens."""
        key = rows.tobytes()
        if key != self._last_key:  # one set of rows usually decodes for many steps
            self._last_key, self._last = key, self._gather(rows)
        if self._last.values is None:
            return ALL_GREEDY
        values = (
            self._last.values.copy()
        )  # the array of the last step may still be copied to the device
        values[:, _UNIFORM] = uniforms(self._keys[rows], positions)
        return SamplingBatch(values, self._last.rows, self._last.filters)

    def _gather(self, rows: np.ndarray) -> SamplingBatch:
        """Return the parameters without random numbers."""
        if self._greedy[rows].all():
            return ALL_GREEDY
        values = np.empty((len(rows), _NUM_COLUMNS))
        values[:, :_UNIFORM] = self._values[rows]
        filtered_rows = np.flatnonzero(self._filtered[rows])
        if not len(filtered_rows):
            return SamplingBatch(values)
        top_k, top_p = values[filtered_rows, _TOP_K:_MIN_P].T
        filters = Filters(
            top_k=bool(top_k.min() < _ALL),
            top_p=bool((top_p < 1).any()),
            max_top_k=int(top_k.max()),
        )
        return SamplingBatch(values, filtered_rows, filters)


def sample_tokens(logits_BV: torch.Tensor, params: SamplingBatch) -> torch.Tensor:
    """Return token ids int64 [B] from float32 logits; INVALID_LOGITS where a row has a NaN or +inf.

    -inf forbids a token; a row without an allowed token gets ALL_FORBIDDEN. Temperature comes first, then min_p, top_k
    and top_p on the resulting distribution. Tokens tied with the last kept token are kept.
    """
    best_B, token_B = logits_BV.max(dim=-1)  # NaN wins a maximum
    if params.values is not None:
        token_B = _draw(logits_BV, best_B, token_B, params)
    if token_B.is_cuda:  # five operators of torch take longer to launch than the maximum takes
        from kernels.triton.mark_invalid import mark_invalid

        mark_invalid(best_B, token_B, invalid=INVALID_LOGITS, forbidden=ALL_FORBIDDEN)
        return token_B
    token_B.masked_fill_((best_B - best_B) != 0, INVALID_LOGITS)  # NaN for NaN and infinities
    return token_B.masked_fill_(best_B == FORBIDDEN, ALL_FORBIDDEN)


def _draw(
    logits_BV: torch.Tensor, best_B: torch.Tensor, greedy_B: torch.Tensor, params: SamplingBatch
) -> torch.Tensor:
    """Return int64 [B]: random tokens, and `greedy_B` in greedy rows."""
    assert params.values is not None, "all rows are greedy"
    values_B6 = to_device(params.values, logits_BV.device)
    # Weights relative to the best token, which has 1: a tiny temperature cannot overflow.
    scaled_BV = (logits_BV - best_B[:, None]).div_(values_B6[:, :1].float())
    weights_BV = scaled_BV.exp_()
    if params.filters is not None and params.rows is not None:
        weights_BV = _filter_rows(weights_BV, values_B6, params.rows, params.filters)
    cumulative_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
    # Below the sum for every uniform below 1, so a token of weight 0 is never drawn.
    target_B = values_B6[:, _UNIFORM] * cumulative_BV[:, -1]
    drawn_B = torch.searchsorted(cumulative_BV, target_B.unsqueeze(1), right=True).squeeze(1)
    return torch.where(values_B6[:, _GREEDY] > 0, greedy_B, drawn_B)


def _filter_rows(
    weights_BV: torch.Tensor, values_B6: torch.Tensor, rows: np.ndarray, filters: Filters
) -> torch.Tensor:
    """Apply `filter_weights` to int64 `rows` of the batch, _FILTER_ROWS at a time. May overwrite the weights."""
    if len(rows) == len(weights_BV) <= _FILTER_ROWS:
        return filter_weights(weights_BV, values_B6, filters)
    for rows_F in to_device(rows, weights_BV.device).split(_FILTER_ROWS):  # type: ignore[no-untyped-call]
        kept_FV = filter_weights(weights_BV[rows_F], values_B6[rows_F], filters)
        weights_BV.index_copy_(0, rows_F, kept_FV)
    return weights_BV


def filter_weights(
    weights_FV: torch.Tensor, values_F6: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Return weights float32 [F, V] in which filtered tokens have 0.

    Weights are relative to the largest of their row, which is 1. values_F6 float64 as in SamplingBatch; top_k _ALL,
    top_p 1 and min_p 0 keep all tokens.
    """
    floor_F = values_F6[:, _MIN_P].float()
    if filters.top_k or filters.top_p:
        sorted_FS = _sort_descending(weights_FV, filters.max_top_k)
        last_F1 = None  # index of the last candidate that top_k keeps, if any row has top_k
        if filters.top_k:
            last_F1 = (values_F6[:, _TOP_K] - 1).clamp_(max=sorted_FS.shape[1] - 1).long()[:, None]
            floor_F = torch.maximum(floor_F, sorted_FS.gather(1, last_F1).squeeze(1))
        if filters.top_p:
            nucleus_F = _nucleus_floor(sorted_FS, values_F6[:, _TOP_P], floor_F, last_F1)
            floor_F = torch.maximum(floor_F, nucleus_F)
    return torch.where(weights_FV >= floor_F[:, None], weights_FV, 0.0)


def _nucleus_floor(
    sorted_FS: torch.Tensor,
    top_p_F: torch.Tensor,
    floor_F: torch.Tensor,
    last_F1: torch.Tensor | None,
) -> torch.Tensor:
    """Return the smallest weight that top_p keeps, float32 [F]; 0 in rows without top_p.

    top_p refers to the candidates that the other filters kept: up to index `last`, down to the floor.
    """
    left_FS = sorted_FS >= floor_F[:, None]
    if last_F1 is not None:
        left_FS &= torch.arange(left_FS.shape[1], device=left_FS.device) <= last_F1
    candidates_FS = (sorted_FS * left_FS).double()
    cumulative_FS = candidates_FS.cumsum(dim=-1)
    enough_F1 = (top_p_F * cumulative_FS[:, -1]).unsqueeze(1)
    # The first candidate with enough cumulative weight is the last candidate to keep.
    needed_F1 = torch.searchsorted(cumulative_FS, enough_F1).clamp_(max=left_FS.shape[1] - 1)
    return torch.where(top_p_F < 1, sorted_FS.gather(1, needed_F1).squeeze(1), 0.0)


def _sort_descending(weights_FV: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Return the `max_top_k` largest values of each row, or all of them, in falling order."""
    if max_top_k < weights_FV.shape[1]:
        return weights_FV.topk(max_top_k).values
    if weights_FV.device.type == "cpu":  # numpy sorts with vector instructions: 9 us instead of 40
        return torch.from_numpy(-np.sort(-weights_FV.numpy(), axis=-1))
    return weights_FV.sort(dim=-1, descending=True).values


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64 [B] in [0, 1) with 53 random bits, from uint64 keys (hashed seeds) and positions."""
    counter = keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    return (_mix(counter) >> _UNUSED_BITS) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser: every input bit changes every output bit half of the time."""
    x = (x ^ (x >> _SHIFT[0])) * _MULTIPLY[0]
    x = (x ^ (x >> _SHIFT[1])) * _MULTIPLY[1]
    mixed: np.ndarray = x ^ (x >> _SHIFT[2])
    return mixed
