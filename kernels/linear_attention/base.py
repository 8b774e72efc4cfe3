"""Linear attention over slots of constant size: the interface of its backends.

The layers are gated delta nets (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024). Of a token, the state S
[k, v] of each value head becomes

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

A sequence with drafts has the row of a decode, which counts, and a row for each draft, of which any number may not
count. Its slot keeps the state after the first row, and the inputs of the drafts. The next step of the sequence first
advances the state by the drafts that were accepted, which it reads from the device. So a step reads and writes each
state once, with drafts or without: a state of Qwen3.6-35B-A3B takes 2.1 MB a layer, the inputs of a draft 16.5 KB. A
state for each draft would be written for each draft, and take 2.1 MB more memory for each.

T tokens, C channels, V value heads, k key dim, v value dim, w conv width, B sequences, K drafts of a slot.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.host.host_copy import to_device
from kernels.interface.backend import Backend, BackendShape
from kernels.interface.linear_attention_spec import LinearAttentionSpec

NORM_EPS = 1e-6  # of the norms of q and k


@dataclass(frozen=True)
class LinearStates:
    """The pool of one layer. Slot 0 is the null slot: padding rows write it, no sequence owns it.

    conv      [slots, w-1, C] in the dtype of the hidden states: the last rows before the convolution, oldest first
    state     [slots, V, k, v] in the spec's `state_dtype`
    drafts    [rows, K, C + 2V] in the dtype of the hidden states: mixed, a and b of the drafts of the last step of a
              sequence; the first slots have them, those of padding and of sequences
    accepted  int64 [rows]: drafts that count and by which the state is not advanced yet; all layers share it
    """

    conv: torch.Tensor
    state: torch.Tensor
    drafts: torch.Tensor
    accepted: torch.Tensor


class LinearAttention(Backend):
    """The linear layers of a model: `plan` once a forward, then one call a layer, which updates the slots in place.

    Where the specs have drafts, `accept` follows each forward.

    A sequence has a state where it has context. Without context its slot is overwritten and never read. Calls wait for
    the previous ubatch before they read a state, because a sequence may straddle the border of two ubatches.
    Where `graph` is true, decodes can be captured, and where `mixed_graph` is true, forwards with prompts too:
    `reserve_graphs` once, `plan_graph` before capture and replay.
    """

    mixed_graph: bool = False

    def __init__(self, specs: Sequence[LinearAttentionSpec]):
        """Take one spec for each linear layer, in order; a call's `layer` is an index of it."""
        self.specs = tuple(specs)
        self.states: Sequence[LinearStates] = ()

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        for spec in shape.linear_specs:
            if spec.num_value_heads % spec.num_key_heads:
                return (
                    f"{spec.num_value_heads} value heads are not a multiple of "
                    f"{spec.num_key_heads} key heads"
                )
        return None

    @classmethod
    @abstractmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        """Return the bytes that one layer allocates for a full step of prompts, its output included."""

    @classmethod
    def slot_bytes(cls, specs: Iterable[LinearAttentionSpec], dtype: torch.dtype) -> int:
        """Return the bytes of one slot of all these layers, without drafts."""
        return sum(spec.slot_bytes(dtype.itemsize) for spec in specs)

    @classmethod
    def draft_bytes(cls, specs: Iterable[LinearAttentionSpec], dtype: torch.dtype) -> int:
        """Return the bytes of one slot's inputs of drafts, of all these layers."""
        return sum(spec.draft_bytes(dtype.itemsize) for spec in specs)

    @classmethod
    def allocate(
        cls,
        specs: Iterable[LinearAttentionSpec],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_rows: int | None = None,
    ) -> list[LinearStates]:
        """Return zeroed pools, one a layer; num_slots includes the null slot.

        num_rows   how many slots, the first ones, sequences may have; None: all
        """
        num_rows = num_slots if num_rows is None else num_rows
        accepted = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return [
            LinearStates(
                torch.zeros(spec.conv_shape(num_slots), dtype=dtype, device=device),
                torch.zeros(
                    spec.state_shape(num_slots),
                    dtype=getattr(torch, spec.state_dtype),
                    device=device,
                ),
                torch.zeros(spec.draft_shape(num_rows), dtype=dtype, device=device),
                accepted,
            )
            for spec in specs
        ]

    def bind(self, states: Sequence[LinearStates]) -> None:
        """Use these pools from now on, one a layer, as `allocate` returns them; none: release the old ones."""
        assert len(states) in (0, len(self.specs)), (len(states), len(self.specs))
        self.states = states

    @property
    def num_drafts(self) -> int:
        """The most drafts of a sequence in a step."""
        return max((spec.num_drafts for spec in self.specs), default=0)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of all layers; no target is a source, no source has accepted drafts. The host does not wait."""
        if not sources or not self.states:
            return
        device = self.states[0].state.device
        source_N, target_N = to_device(np.array((sources, targets), dtype=np.int64), device)
        for pool in self.states:
            for slots in (pool.conv, pool.state):
                slots[target_N] = slots[source_N]
        accepted = self.states[0].accepted
        if self.num_drafts and (rows := [slot for slot in targets if slot < len(accepted)]):
            accepted[to_device(np.array(rows), device)] = 0

    def accept(self, slots_B: torch.Tensor, accepted_B: torch.Tensor | None = None) -> None:
        """Enter how many drafts of the forward before count, of each of its sequences. The host does not wait.

        Behind each forward of specs with drafts, on the stream of the forward.

        slots      int64 [B], on the device
        accepted   int64 [B], on the device, 0 without drafts; None: there were no drafts
        """
        if not self.num_drafts or not self.states:
            return
        accepted = self.states[0].accepted
        if accepted_B is None:
            accepted.index_fill_(0, slots_B, 0)
        else:
            accepted.index_copy_(0, slots_B, accepted_B)

    def decode_starts(self, batch: AttentionBatch) -> np.ndarray:
        """Return int64 [S+1]: the first row of each of the S sequences without prompts, then the row behind them."""
        starts = batch.query_start_loc_cpu[: batch.num_decodes + 1].astype(np.int64)
        most = int(np.diff(starts).max(initial=1))
        assert most <= 1 + self.num_drafts, f"{most - 1} drafts, slots keep {self.num_drafts}"
        return starts

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of this forward share. Without `state_slots` all sequences use the null slot."""

    @abstractmethod
    def __call__(
        self,
        mixed_TC: torch.Tensor,
        a_TV: torch.Tensor,
        b_TV: torch.Tensor,
        layer: int,
        conv_weight_Cw: torch.Tensor,
        neg_exp_a_V: torch.Tensor,
        dt_bias_V: torch.Tensor,
    ) -> torch.Tensor:
        """Advance each sequence by its new tokens; return o_TVv, contiguous, in the dtype of mixed.

        q and k get norms of 1, q is scaled by 1 / sqrt(k). Rows of padding return zeros.

        mixed        q of all heads, k of all heads, v of all heads, before convolution and SiLU; rows may be strided
        a, b         the gates' projections: g = neg_exp_a * softplus(a + dt_bias), beta = sigmoid(b); rows may be
                     strided
        conv_weight  the newest token has the last weight
        neg_exp_a    float32: -exp(A_log)
        dt_bias      float32
        """

    def reserve_graphs(self, max_rows: int, max_seqs: int) -> None:
        """Allocate for graphs of up to `max_rows` rows and, in graphs with drafts or prompts, `max_seqs` sequences.

        Graphs captured before the call must not be replayed after it.
        """
        raise NotImplementedError(f"{self.name} has no graphs")

    def plan_graph(
        self, batch: AttentionBatch, num_rows: int, *, prompts: bool, drafts: bool = False
    ) -> None:
        """Plan for a graph of `num_rows` rows, of decodes alone, with drafts, or with drafts and prompts.

        Every address and launch shape equals that of the capture with the same arguments. Rows without a token write
        no slot and return zeros.
        """
        raise NotImplementedError(f"{self.name} has no graphs")


def fresh_sequences(batch: AttentionBatch) -> np.ndarray:
    """Return bool [B]: the sequences without context, which have no state."""
    fresh: np.ndarray = batch.seq_lens_cpu == np.diff(batch.query_start_loc_cpu)
    return fresh


def state_slots(batch: AttentionBatch, device: torch.device) -> torch.Tensor:
    """Return int64 [B]: each sequence's slot."""
    if batch.state_slots is not None:
        return batch.state_slots
    return torch.zeros(batch.num_seqs, dtype=torch.int64, device=device)


def signed_slots(batch: AttentionBatch, device: torch.device) -> torch.Tensor:
    """Return int64 [B], contiguous: each sequence's slot, negative for sequences without a state."""
    slots, fresh = state_slots(batch, device), fresh_sequences(batch)
    if fresh.any():
        slots = slots * to_device(1 - 2 * fresh.astype(np.int64), device)
    return slots.contiguous()
