"""Picks the next token of every row. Knows nothing of requests, batches of tokens or the model.

A row's token depends on its logits, its parameters, and one random number hashed from (seed, position):
never on the other rows, on their order, or on what was drawn before. Tokens are drawn by inverting the
cumulative distribution in the order of the vocabulary. In order of probability two tokens that are
almost equally likely would change places with the last bit of a logit, and with it half of the draws.

B rows, F rows with a filter, V vocabulary, S sorted candidates of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.request import SamplingParams

INVALID = -1

# Columns of the numbers that travel to the device together, all float64.
_TEMPERATURE, _GREEDY, _TOP_K, _TOP_P, _MIN_P, _UNIFORM, _NUM_COLUMNS = range(7)

# Constants of the SplitMix64 generator: the step of its counter and its finaliser.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)


@dataclass(frozen=True)
class SamplingBatch:
    """What `sample` needs for B rows, on the host.

    values     float64 [B, 6] (see the columns above), or None when all rows are greedy
    filtered   int64 [F] rows that sample with top_k, top_p or min_p
    max_top_k  largest top_k of those rows, 0 when one of them has none
    """

    values: np.ndarray | None = None
    filtered: np.ndarray | None = None
    max_top_k: int = 0

    @classmethod
    def from_rows(cls, params: Sequence[SamplingParams], positions: np.ndarray) -> "SamplingBatch":
        """For callers without slots: positions int [B], one for each of `params`."""
        table = SamplingTable(len(params))
        for row, row_params in enumerate(params):
            table.set(row, row_params)
        return table.batch(np.arange(len(params)), np.asarray(positions))


ALL_GREEDY = SamplingBatch()


class SamplingTable:
    """The parameters of running requests by slot, so that a step only gathers them."""

    def __init__(self, max_num_seqs: int):
        self._values = np.zeros((max_num_seqs, _NUM_COLUMNS - 1))
        self._values[:, [_TEMPERATURE, _GREEDY, _TOP_P]] = 1.0
        self._greedy = np.ones(max_num_seqs, dtype=bool)
        self._filtered = np.zeros(max_num_seqs, dtype=bool)
        self._keys = np.zeros(max_num_seqs, dtype=np.uint64)

    def set(self, row: int, params: SamplingParams) -> None:
        """A request moves into slot `row`."""
        greedy = params.temperature == 0
        self._greedy[row] = greedy
        self._filtered[row] = not greedy and (
            params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        )
        self._values[row] = (
            1.0 if greedy else params.temperature,
            greedy,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
        )
        seed = np.array([params.seed % 2**64], dtype=np.uint64)
        self._keys[row] = _mix(seed)[0]

    def batch(self, rows: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        """rows int64 [B] slots; positions int64 [B], the position that each new token will have."""
        if self._greedy[rows].all():
            return ALL_GREEDY
        values = np.empty((len(rows), _NUM_COLUMNS))
        values[:, :_UNIFORM] = self._values[rows]
        values[:, _UNIFORM] = uniforms(self._keys[rows], positions)
        filtered = np.flatnonzero(self._filtered[rows])
        top_k = values[filtered, _TOP_K]
        max_top_k = int(top_k.max()) if len(filtered) and top_k.all() else 0
        return SamplingBatch(values, filtered, max_top_k)


def sample(logits_BV: torch.Tensor, params: SamplingBatch) -> torch.Tensor:
    """Token ids int64 [B] from float32 logits; INVALID where a row's logits are NaN or infinite.

    -inf forbids a token; a row without an allowed token is INVALID. Temperature comes first, then
    min_p, top_k and top_p on the distribution it gave. Tokens tied with the last one kept are kept.
    """
    best_B, token_B = logits_BV.max(dim=-1)  # NaN wins a maximum
    if params.values is not None:
        token_B = _draw(logits_BV, best_B, token_B, params)
    return torch.where(best_B.abs() < torch.inf, token_B, INVALID)


def _draw(
    logits_BV: torch.Tensor, best_B: torch.Tensor, greedy_B: torch.Tensor, params: SamplingBatch
) -> torch.Tensor:
    """Random tokens, and `greedy_B` in greedy rows. int64 [B]."""
    assert params.values is not None and params.filtered is not None
    columns = torch.from_numpy(params.values).to(logits_BV.device, non_blocking=True).unbind(1)
    # Weights relative to the best token, which has 1: a tiny temperature cannot overflow.
    scaled_BV = (logits_BV - best_B[:, None]).div_(columns[_TEMPERATURE].float()[:, None])
    weights_BV = scaled_BV.exp_()
    if len(params.filtered):
        rows_F = torch.from_numpy(params.filtered).to(logits_BV.device)
        weights_FV = weights_BV.index_select(0, rows_F)
        top_k, top_p, min_p = (columns[c].index_select(0, rows_F) for c in (_TOP_K, _TOP_P, _MIN_P))
        kept_FV = filter_weights(weights_FV, top_k, top_p, min_p, params.max_top_k)
        weights_BV.index_copy_(0, rows_F, kept_FV)
    cumulative_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
    # Below the sum for every uniform below 1, so a token of weight 0 is never hit.
    target_B1 = (columns[_UNIFORM] * cumulative_BV[:, -1]).unsqueeze(1)
    drawn_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1)
    return torch.where(columns[_GREEDY] > 0, greedy_B, drawn_B)


def filter_weights(
    weights_FV: torch.Tensor,
    top_k_F: torch.Tensor,
    top_p_F: torch.Tensor,
    min_p_F: torch.Tensor,
    max_top_k: int,
) -> torch.Tensor:
    """Weights float32 [F, V] with those of the tokens that are filtered out set to 0.

    weights are relative to the row's largest. top_k 0, top_p 1 and min_p 0 (each float64 [F]) let
    everything pass. max_top_k bounds top_k where all rows have one, so that no full sort is needed; else 0.
    """
    vocab_size = weights_FV.shape[1]
    if 0 < max_top_k < vocab_size:
        sorted_FS = weights_FV.topk(max_top_k).values
    else:
        sorted_FS = weights_FV.sort(dim=-1, descending=True).values
    num_sorted = sorted_FS.shape[1]
    k_F = torch.where(top_k_F > 0, top_k_F, vocab_size).clamp_(max=num_sorted).long()
    floor_F = torch.maximum(
        torch.where(top_k_F > 0, sorted_FS.gather(1, (k_F - 1)[:, None])[:, 0], 0.0),
        (min_p_F * sorted_FS[:, 0]).float(),
    )
    # top_p counts in what the other two left: the first k, down to the floor.
    index_S = torch.arange(num_sorted, device=weights_FV.device)
    left_FS = (index_S < k_F[:, None]) & (sorted_FS >= floor_F[:, None])
    left_weights_FS = torch.where(left_FS, sorted_FS, 0.0).double()
    cumulative_FS = left_weights_FS.cumsum(dim=-1)
    before_FS = cumulative_FS - left_weights_FS
    in_nucleus_FS = before_FS < (top_p_F * cumulative_FS[:, -1])[:, None]
    num_kept_F = (in_nucleus_FS & left_FS).sum(dim=-1).clamp_(min=1)
    nucleus_floor_F = sorted_FS.gather(1, (num_kept_F - 1)[:, None])[:, 0]
    floor_F = torch.where(top_p_F < 1, torch.maximum(floor_F, nucleus_floor_F), floor_F)
    return torch.where(weights_FV >= floor_F[:, None], weights_FV, 0.0)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1) with 53 random bits, from uint64 keys (hashed seeds) and positions."""
    counter = keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    return (_mix(counter) >> _UNUSED_BITS) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit changes every output bit half of the time."""
    x = (x ^ (x >> _SHIFT[0])) * _MULTIPLY[0]
    x = (x ^ (x >> _SHIFT[1])) * _MULTIPLY[1]
    return x ^ (x >> _SHIFT[2])
