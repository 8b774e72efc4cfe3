"""Rows of gated delta nets in torch's operators: convolution, heads and gates, and the recurrence over few rows.

T tokens, C channels, V value heads, K key heads, k key dim, v value dim, w conv width, B sequences, R
most new rows of a sequence, M rows with the accepted drafts before them.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from kernels.host.host_copy import to_device
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import (
    NORM_EPS,
    LinearStates,
)


@dataclass(frozen=True)
class Rows:
    """The inputs of some rows, with the layer's weights."""

    mixed: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    conv_weight: torch.Tensor
    neg_exp_a: torch.Tensor
    dt_bias: torch.Tensor

    def cut(self, start: int, end: int) -> "Rows":
        """Return the rows from `start` to `end`."""
        mixed, a, b = (x[start:end] for x in (self.mixed, self.a, self.b))
        return Rows(mixed, a, b, self.conv_weight, self.neg_exp_a, self.dt_bias)

    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return g and beta, float32 [..., V]."""
        g = self.neg_exp_a * F.softplus(self.a.float() + self.dt_bias)
        return g, self.b.float().sigmoid()


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of one kind on the device.

    slots   int64 [B]
    fresh   bool [B]: no state; None: all have one
    """

    slots: torch.Tensor
    fresh: torch.Tensor | None

    @classmethod
    def of(cls, slots: torch.Tensor, fresh: np.ndarray) -> "Sequences":
        """Return sequences with these slots; fresh: bool [B]."""
        return cls(slots, to_device(fresh, slots.device) if fresh.any() else None)

    def load(self, pool: torch.Tensor) -> torch.Tensor:
        """Return copies of the slots; zeros for fresh sequences, because their slots may hold anything."""
        loaded = pool[self.slots]
        if self.fresh is not None:
            loaded[self.fresh] = 0
        return loaded


@dataclass(frozen=True, eq=False)
class Decodes:
    """The sequences of a batch with the row of a decode, maybe with rows of drafts behind it.

    num_rows     of all of them
    num_before   rows of the first sequence that an earlier ubatch computed in this step
    rows_BR      the rows of each sequence; places behind its last row repeat it
    places_BR    the place of each of them among the rows of its sequence
    draft_seqs, draft_rows, draft_places   of each row of a draft: sequence, row, and place among the sequence's drafts
    """

    sequences: Sequences
    num_rows: int
    num_before: int
    rows_BR: torch.Tensor
    places_BR: torch.Tensor
    draft_seqs: torch.Tensor
    draft_rows: torch.Tensor
    draft_places: torch.Tensor

    @classmethod
    def of(
        cls, starts: np.ndarray, before: int, slots: torch.Tensor, fresh: np.ndarray
    ) -> "Decodes":
        """Return the sequences with these first rows, [B+1]; slots [B] and fresh [B] may have more sequences."""
        counts = np.diff(starts)
        count = len(counts)
        places_BR = np.minimum(np.arange(counts.max(initial=1)), counts[:, None] - 1)
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        places[: counts[0] if count else 0] += before
        drafts = np.flatnonzero(places)
        seqs = np.repeat(np.arange(count), counts)
        arrays = starts[:-1, None] + places_BR, places_BR, seqs[drafts], drafts, places[drafts] - 1
        return cls(
            Sequences.of(slots[:count], fresh[:count]),
            int(starts[-1]),
            before,
            *(to_device(array, slots.device) for array in arrays),
        )

    def kept(self, pool: LinearStates) -> torch.Tensor:
        """Return int64 [B]: drafts in the slot of each sequence that come before its rows."""
        kept_B = self.sequences.load(pool.accepted)
        if self.num_before:
            kept_B[0] = self.num_before - 1
        return kept_B


def activated(mixed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return SiLU of the convolution's output, rounded to the dtype of the hidden states, in float32."""
    return F.silu(mixed).to(dtype).float()


def heads(
    mixed_TC: torch.Tensor, spec: LinearAttentionSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [..., K, k] with norms of 1 / sqrt(k), k [..., K, k] with norms of 1, and v [..., V, v]."""
    q, k, v = mixed_TC.split_with_sizes((spec.key_size, spec.key_size, spec.value_size), -1)
    q, k = (x.view(*x.shape[:-1], spec.num_key_heads, spec.key_dim) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    return q * spec.key_dim**-0.5, k, v.view(*v.shape[:-1], spec.num_value_heads, spec.value_dim)


def advance_decodes(
    rows: Rows,
    spec: LinearAttentionSpec,
    pool: LinearStates,
    decodes: Decodes,
    out_TVv: torch.Tensor,
) -> None:
    """Advance each sequence by its accepted drafts and its rows, and write the outputs of its rows.

    The slot gets the state after the first row, and the inputs of the rows behind it.
    """
    sequences, dtype = decodes.sequences, rows.mixed.dtype
    kept_B, inputs_BMX = _inputs(rows, spec, pool, decodes)
    mixed_BMC, a_BMV, b_BMV = inputs_BMX.split_with_sizes(
        (spec.channels, spec.num_value_heads, spec.num_value_heads), -1
    )
    window_BNC = torch.cat((sequences.load(pool.conv), mixed_BMC), 1)
    count = mixed_BMC.shape[1]
    weight_wC = rows.conv_weight.float().T
    sums = window_BNC[:, :count].float() * weight_wC[0]
    for shift in range(1, spec.conv_width):
        sums.addcmul_(window_BNC[:, shift : shift + count].float(), weight_wC[shift])
    q, k, v_BMVv = heads(activated(sums, dtype), spec)
    q_BMVk, k_BMVk = (x.repeat_interleave(spec.group_size, -2) for x in (q, k))
    g_BMV, beta_BMV = replace(rows, a=a_BMV, b=b_BMV).gates()
    state_BVkv = sequences.load(pool.state).float()
    first_BVkv, outs = state_BVkv, []
    for m in range(count):
        state_BVkv = state_BVkv * g_BMV[:, m, :, None, None].exp()
        delta_BVv = v_BMVv[:, m] - torch.einsum("bhkv,bhk->bhv", state_BVkv, k_BMVk[:, m])
        delta_BVv *= beta_BMV[:, m].unsqueeze(-1)
        state_BVkv.addcmul_(k_BMVk[:, m].unsqueeze(-1), delta_BVv.unsqueeze(-2))
        outs.append(torch.einsum("bhkv,bhk->bhv", state_BVkv, q_BMVk[:, m]))
        state_BVkv = state_BVkv.to(pool.state.dtype).float()  # as the next step would read it
        first_BVkv = torch.where((kept_B == m)[:, None, None, None], state_BVkv, first_BVkv)
    place_BR = kept_B.unsqueeze(1) + decodes.places_BR
    seq_B1 = torch.arange(len(kept_B), device=kept_B.device).unsqueeze(1)
    out_TVv[decodes.rows_BR] = torch.stack(outs, 1)[seq_B1, place_BR].to(dtype)
    tail = torch.arange(1, spec.conv_width, device=kept_B.device)
    first_BtC = window_BNC[seq_B1, kept_B.unsqueeze(1) + tail]
    begun = int(decodes.num_before > 0)  # an earlier ubatch has kept the state of this sequence
    slots = sequences.slots[begun:]
    pool.state[slots] = first_BVkv[begun:].to(pool.state.dtype)
    pool.conv[slots] = first_BtC[begun:]


def _inputs(
    rows: Rows, spec: LinearAttentionSpec, pool: LinearStates, decodes: Decodes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many accepted drafts each sequence has, [B], and the inputs of these and of its rows, [B, M, C + 2V].

    The slots get the inputs of the new drafts. Places behind the last row of a sequence repeat it.
    """
    inputs_TX = torch.cat((rows.mixed, rows.a, rows.b), 1)
    new_BRX = inputs_TX[decodes.rows_BR]
    sequences, num_drafts = decodes.sequences, spec.num_drafts
    if not num_drafts:
        return torch.zeros_like(sequences.slots), new_BRX
    kept_B = decodes.kept(pool)
    # On a GPU the host would wait for the number.
    most = int(kept_B.max()) if kept_B.device.type == "cpu" else num_drafts
    place_1M = torch.arange(most + new_BRX.shape[1], device=kept_B.device).unsqueeze(0)
    new_BM = place_1M - kept_B.unsqueeze(1)
    source_BM = torch.where(new_BM < 0, place_1M, (most + new_BM).clamp(max=place_1M.shape[1] - 1))
    both_BMX = torch.cat((sequences.load(pool.drafts)[:, :most], new_BRX), 1)
    seq_B1 = torch.arange(len(kept_B), device=kept_B.device).unsqueeze(1)
    slots = sequences.slots[decodes.draft_seqs]
    pool.drafts[slots, decodes.draft_places] = inputs_TX[decodes.draft_rows]
    return kept_B, both_BMX[seq_B1, source_BM]
