"""Gated delta nets by torch's operators: runs everywhere, and is the reference of other backends.

Prompts go in chunks of 64 tokens. Within a chunk the delta rule is one triangular system (the WY form of products of
Householder matrices; Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024), so all chunks are
solved at once. Then one step a chunk carries the states on, for all prompts together.

T tokens, C channels, V value heads, K key heads, G = V / K, k key dim, v value dim, w conv width, N chunks, L tokens
of a chunk, B sequences, n prompts.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.interface.backend import BackendShape
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import (
    LinearAttention,
    LinearStates,
    fresh_sequences,
    state_slots,
)
from kernels.linear_attention.chunks import MAX_CHUNK, Chunks
from kernels.linear_attention.torch_rows import (
    Decodes,
    Rows,
    Sequences,
    activated,
    advance_decodes,
    heads,
)
from kernels.pending import wait_previous_ubatch


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of a batch, in the order of their chunks.

    tails    [n, w-1] and rows [tokens]: the places of the convolution's inputs, where each prompt's tail comes before
             its tokens
    last     [n, w-1]: the places of each prompt's new tail
    """

    sequences: Sequences
    steps: tuple[int, ...]
    rows_NL: torch.Tensor
    real_NL: torch.Tensor
    places: torch.Tensor
    tail_places: torch.Tensor
    row_places: torch.Tensor
    last_places: torch.Tensor


class TorchLinearAttention(LinearAttention):
    """Decodes in one batched step, prompts in chunks; float32 whatever the dtype of the inputs and of the states."""

    name = "torch"
    auto = "torch's operators run everywhere"

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        return shape.max_num_tokens * max(map(_token_bytes, shape.linear_specs), default=0)

    def plan(self, batch: AttentionBatch) -> None:
        device = batch.block_table.device
        slots, fresh = state_slots(batch, device), fresh_sequences(batch)
        self._num_tokens = batch.num_tokens
        decodes = batch.num_decodes
        starts = self.decode_starts(batch)
        self._decodes = Decodes.of(starts, batch.rows_before, slots, fresh)
        self._prompts: dict[int, Prompts] = {}
        if batch.num_seqs > decodes:
            lengths = np.diff(batch.query_start_loc_cpu)[decodes:].astype(np.int64)
            chunks = Chunks.cut(lengths)
            for width in {spec.conv_width for spec in self.specs}:
                self._prompts[width] = _prompts(
                    chunks, lengths, slots[decodes:], fresh[decodes:], width
                )

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
        spec, pool = self.specs[layer], self.states[layer]
        rows = Rows(mixed_TC, a_TV, b_TV, conv_weight_Cw, neg_exp_a_V, dt_bias_V)
        out_TVv = mixed_TC.new_empty(mixed_TC.shape[0], spec.num_value_heads, spec.value_dim)
        out_TVv[self._num_tokens :] = 0
        wait_previous_ubatch()
        cut = self._decodes.num_rows
        if cut:
            self._decode(rows.cut(0, cut), spec, pool, out_TVv[:cut])
        if self._prompts:
            prompts = self._prompts[spec.conv_width]
            part = rows.cut(cut, self._num_tokens)
            out_TVv[cut : self._num_tokens] = _advance_prompts(part, spec, pool, prompts)
        return out_TVv

    def _decode(
        self, rows: Rows, spec: LinearAttentionSpec, pool: LinearStates, out_TVv: torch.Tensor
    ) -> None:
        """Advance each decode by its rows."""
        advance_decodes(rows, spec, pool, self._decodes, out_TVv)


def _token_bytes(spec: LinearAttentionSpec) -> int:
    """Bytes of a prompt's token: its channels three times; of a value head right sides and solutions, grown queries and
    decayed keys, values and outputs twice, and three rows of a matrix between the tokens of a chunk."""
    head = 4 * spec.key_dim + 4 * spec.value_dim + 3 * MAX_CHUNK
    return (3 * spec.channels + spec.num_value_heads * head) * 4


def _prompts(
    chunks: Chunks, lengths: np.ndarray, slots: torch.Tensor, fresh: np.ndarray, width: int
) -> Prompts:
    device, order, tail = slots.device, chunks.order, width - 1
    ends = np.cumsum(lengths + tail)
    tails = (ends - lengths - tail)[order, None] + np.arange(tail)
    last = (ends - tail)[order, None] + np.arange(tail)
    before = np.repeat(tail * np.arange(1, len(lengths) + 1), lengths)
    rows = np.arange(int(lengths.sum())) + before

    def on_device(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return Prompts(
        Sequences.of(slots[on_device(order)], fresh[order]),
        chunks.steps,
        *map(on_device, (chunks.rows, chunks.real, chunks.places, tails, rows, last)),
    )


def _grouped(x_NV: torch.Tensor, spec: LinearAttentionSpec) -> torch.Tensor:
    """Return x [N, V, ...] as [N, K, G, ...]."""
    return x_NV.view(len(x_NV), spec.num_key_heads, spec.group_size, *x_NV.shape[2:])


def _convolve(
    rows: Rows, spec: LinearAttentionSpec, pool: LinearStates, prompts: Prompts
) -> torch.Tensor:
    """Return the convolution's output of each token, after SiLU, float32 [T, C]; update the tails."""
    tail, (num_tokens, channels) = spec.conv_width - 1, rows.mixed.shape
    inputs = rows.mixed.new_empty(num_tokens + prompts.tail_places.numel(), channels)
    inputs[prompts.tail_places] = prompts.sequences.load(pool.conv)
    inputs[prompts.row_places] = rows.mixed
    pool.conv[prompts.sequences.slots] = inputs[prompts.last_places]
    count = len(inputs) - tail
    weight_wC = rows.conv_weight.float().T
    sums = inputs[:count].float() * weight_wC[0]
    for shift in range(1, spec.conv_width):
        sums.addcmul_(inputs[shift : shift + count].float(), weight_wC[shift])
    return activated(sums[prompts.row_places - tail], rows.mixed.dtype)


def _advance_prompts(
    rows: Rows, spec: LinearAttentionSpec, pool: LinearStates, prompts: Prompts
) -> torch.Tensor:
    """Return o [T, V, v], float32."""
    mixed_TC = _convolve(rows, spec, pool, prompts)
    g_TV, beta_TV = rows.gates()
    places, real_NL = prompts.rows_NL, prompts.real_NL
    q, k, v = (x[places].transpose(1, 2) for x in heads(mixed_TC, spec))
    q_NKLk, k_NKLk = q.unsqueeze(2), k.unsqueeze(2)
    v_NKGLv = _grouped(v, spec)
    # A place without a token changes no state: it has no decay and no weight.
    g, beta = (
        _grouped((x[places] * real_NL.unsqueeze(-1)).transpose(1, 2), spec) for x in (g_TV, beta_TV)
    )
    decay_NKGL = g.cumsum(-1)
    size = decay_NKGL.shape[-1]
    pairs = (decay_NKGL.unsqueeze(-1) - decay_NKGL.unsqueeze(-2)).masked_fill_(
        torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1), float("-inf")
    )
    pairs.exp_()
    system = (k_NKLk @ k_NKLk.transpose(-1, -2)) * pairs * beta.unsqueeze(-1)
    scores = (q_NKLk @ k_NKLk.transpose(-1, -2)) * pairs
    grown = decay_NKGL.exp().unsqueeze(-1)
    known = torch.cat((v_NKGLv, k_NKLk * grown), -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, keys = solved.split_with_sizes((spec.value_dim, spec.key_dim), -1)
    total = decay_NKGL[..., -1:]
    q_NKGLk = q_NKLk * grown
    # Keys of places without a token count for nothing because their values are 0.
    k_NKGkL = (k_NKLk * (total - decay_NKGL).exp().unsqueeze(-1)).transpose(-1, -2)
    out = torch.empty_like(values)
    state = _grouped(prompts.sequences.load(pool.state).float(), spec)
    first = 0
    for count in prompts.steps:
        part = slice(first, first + count)
        new = values[part] - keys[part] @ state[:count]
        out[part] = q_NKGLk[part] @ state[:count] + scores[part] @ new
        state[:count] = state[:count] * total[part].exp().unsqueeze(-1) + k_NKGkL[part] @ new
        first += count
    pool.state[prompts.sequences.slots] = state.flatten(1, 2).to(pool.state.dtype)
    return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)[prompts.places]
