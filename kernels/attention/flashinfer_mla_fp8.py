"""Latent attention (MLA) over a cache in e4m3 on Hopper GPUs: decodes by our kernel, prompts by flashinfer.

Prompts expand latents into heads of K and V as `flashinfer_mla` does: those of the new rows, which are rounded as the
cache is, and those of computed tokens, which become bfloat16 a chunk at a time. Decodes can be captured in CUDA graphs.

T tokens, H heads, n unrotated values of a head of q and k, d of q and k, v values of a head of V, u = n + v, C values
of a latent, W of a cached token, B decodes, L keys of a chunk.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.decode_chunks import cut_rows, leaves_whole, max_chunks, whole_rows
from kernels.attention.flashinfer_mla import FlashInferMlaAttention
from kernels.attention.flashinfer_modules import compile_missing, latent_modules
from kernels.host.triton_version import triton_unavailable
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape

PROGRAMS_PER_SM = 1  # of decodes, at a time


class FlashInferMlaFp8Attention(FlashInferMlaAttention):
    """One launch for decodes, or two where they are cut; prompts as in `flashinfer_mla`."""

    name = "flashinfer_mla_fp8"
    auto = "reads latents (MLA) in FP8: decodes by our kernel, prompts expanded in chunks"
    fp8_cache = True
    cascades = False
    distributions = ("flashinfer-python", "triton")

    def __init__(self, specs: Sequence[AttentionSpec], block_size: int):
        super().__init__(specs, block_size)
        from kernels.triton.decode_merge import Chunks
        from kernels.triton.latent_decode import head_parts, latent_decode
        from kernels.triton.read_latents import read_latents

        self._latent_decode, self._read_latents = latent_decode, read_latents
        self._chunks_type: Any = Chunks
        self._head_parts: int = head_parts(self.spec.num_heads)
        self._programs = 1
        self._decode_chunks: Any = None  # kernels.triton.decode_merge.Chunks of the planned decodes

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return triton_unavailable() or super().unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if reason := super().unsupported_reason(shape):
            return reason
        if not all(spec.fp8_cache for spec in shape.attention_specs):
            return "it reads latents in e4m3 alone, cache.dtype is not fp8"
        return None

    @classmethod
    def compile_kernels(cls, dtype: torch.dtype, specs: Iterable[AttentionSpec]) -> None:
        compile_missing(latent_modules(dtype, specs, decodes=False))

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        super().bind(kv_caches)
        if kv_caches and self._device.type == "cuda":
            sms = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._programs = max(1, PROGRAMS_PER_SM * sms // self._head_parts)

    def _load_decodes(self) -> None:
        """Do nothing: the kernel compiles at its first launch."""

    def _plan_single_rows(self, batch: AttentionBatch) -> None:
        rows = batch.num_single_rows
        lens = batch.seq_lens_cpu[:rows]
        arrays, cut = self._arrays(lens, rows, cuts=not self._whole(lens, rows))
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int32)).to(self._device)
        self._take_chunks(packed, arrays, batch.block_table[:rows], cut=cut)

    def _whole(self, seq_lens: np.ndarray, num_rows: int) -> bool:
        """Return whether these decodes are not worth a cut."""
        return leaves_whole(seq_lens, num_rows, max_chunks(num_rows, self._programs))

    def _arrays(
        self, seq_lens: np.ndarray, num_rows: int, *, cuts: bool
    ) -> tuple[tuple[np.ndarray, ...], bool]:
        """Return the chunks of `num_rows` rows, of which the last may be empty, and whether rows may have several."""
        if cuts:
            most = max_chunks(num_rows, self._programs)
            return cut_rows(seq_lens, None, num_rows, most).arrays, True
        return whole_rows(seq_lens, None, num_rows).arrays, False

    def _take_chunks(
        self,
        integers: torch.Tensor,
        arrays: Sequence[np.ndarray],
        block_table: torch.Tensor,
        *,
        cut: bool,
    ) -> None:
        parts = integers.split_with_sizes([len(it) for it in arrays])
        self._decode_chunks = self._chunks_type(*parts, block_table, cut=cut)

    def _attend_absorbed(
        self, q_HBC: torch.Tensor, rope_BHr: torch.Tensor, layer: int
    ) -> torch.Tensor:
        q_BHC = q_HBC.transpose(0, 1)
        out_BHC = torch.empty_like(q_BHC, memory_format=torch.contiguous_format)
        self._latent_decode(
            *(q_BHC, rope_BHr, self._latents[layer], out_BHC, self._decode_chunks),
            scale=self.spec.scale,
        )
        return out_BHC.transpose(0, 1)

    def _cached(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self._read_latents(self._latents[layer], slots)

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        new: dict[str, Any] = {"device": self._device}
        integers = 3 * max_chunks(max_rows, self._programs) + max_rows + 1
        self._graph_integers = torch.zeros(integers, dtype=torch.int32, **new)
        self._graph_table = torch.zeros(max_seqs, max_blocks, dtype=torch.int64, **new)
        self._graph_slots = torch.zeros(max_rows, dtype=torch.int64, **new)

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        assert not prompts, "steps with prompts are not captured"
        return GraphForm.EVEN_DECODES, GraphForm.DECODES

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        even, general = self.forms(num_rows, prompts=prompts)
        return even if self._whole(batch.seq_lens_cpu, num_rows) else general

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        seqs, table = batch.num_seqs, self._graph_table
        assert batch.num_single_rows == seqs == batch.num_tokens <= num_rows
        rows, columns = batch.block_table.shape
        assert rows <= len(table) and columns <= table.shape[1], (
            "reserve_graphs was given fewer blocks"
        )
        arrays, cut = self._arrays(
            batch.seq_lens_cpu, num_rows, cuts=form != GraphForm.EVEN_DECODES
        )
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int32))
        integers = self._graph_integers[: len(packed)]
        integers.copy_(packed, non_blocking=True)
        table[:rows, :columns].copy_(batch.block_table)
        self._slots = self._graph_slots[:num_rows]
        self._slots[:seqs].copy_(batch.slot_mapping[:seqs])
        self._slots[seqs:].fill_(-1)
        self._take_chunks(integers, arrays, table, cut=cut)
        self._chunks = []
        self._num_decodes = self._num_rows = num_rows
