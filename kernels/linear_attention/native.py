"""Gated delta nets with decodes in C, which updates each state where it lies. float32 on CPU, states maybe bfloat16."""

from collections.abc import Sequence

import torch

from kernels.attention.batch import AttentionBatch
from kernels.interface.backend import BackendShape
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import NORM_EPS, LinearStates, signed_slots
from kernels.linear_attention.torch_chunked import TorchLinearAttention
from kernels.linear_attention.torch_rows import Rows
from kernels.native.library import load, native_unavailable, native_unsupported_reason


class NativeLinearAttention(TorchLinearAttention):
    """Prompts as in `torch`; 8 decodes of 8 value heads of 32 take 50 us a layer, in `torch` 450 us."""

    name = "native"
    devices = ("cpu",)
    auto = "compiled C updates the states of decodes where they lie"

    def __init__(self, specs: Sequence[LinearAttentionSpec]):
        super().__init__(specs)
        self._delta_decode = load().delta_decode
        self._scratch = torch.empty(max(map(_scratch_size, specs), default=0))

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return native_unavailable()

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        reason = native_unsupported_reason(shape.dtype_name)
        return reason or super().unsupported_reason(shape)

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._slots = signed_slots(batch, batch.block_table.device)
        self._starts = torch.from_numpy(self.decode_starts(batch))

    def _decode(
        self, rows: Rows, spec: LinearAttentionSpec, pool: LinearStates, out_TVv: torch.Tensor
    ) -> None:
        inputs = (rows.mixed, rows.a, rows.b)
        for x in inputs:
            assert x.dtype == torch.float32 and x.stride(1) == 1
        assert rows.conv_weight.is_contiguous() and out_TVv.is_contiguous()
        self._delta_decode(
            *(value for x in inputs for value in (x.data_ptr(), x.stride(0))),
            rows.conv_weight.data_ptr(),
            rows.neg_exp_a.data_ptr(),
            rows.dt_bias.data_ptr(),
            self._slots.data_ptr(),
            self._starts.data_ptr(),
            self._decodes.num_before,
            len(self._starts) - 1,
            spec.num_key_heads,
            spec.group_size,
            spec.key_dim,
            spec.value_dim,
            spec.conv_width,
            spec.num_drafts,
            NORM_EPS,
            pool.conv.data_ptr(),
            pool.state.data_ptr(),
            pool.state.dtype == torch.bfloat16,
            pool.drafts.data_ptr(),
            pool.accepted.data_ptr(),
            out_TVv.data_ptr(),
            self._scratch.data_ptr(),
        )


def _scratch_size(spec: LinearAttentionSpec) -> int:
    """Floats of `delta_decode`: accepted drafts, a row and its drafts, a tail, a head's state and outputs."""
    rows = (2 * spec.num_drafts + 1) * spec.row_size
    tail, state = (spec.conv_width - 1) * spec.channels, spec.key_dim * spec.value_dim
    return rows + tail + state + spec.value_dim
