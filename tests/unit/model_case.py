"""A model of one rank on the CPU with caches, and batches for it: shared by the model's tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.all2all.local import LocalAllToAll
from kernels.attention.base import Attention
from kernels.attention.mla import MlaAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.backends.select import Backends
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.interface.registry import backend_class
from kernels.linear_attention.base import LinearAttention
from kernels.linear_attention.triton_delta import HEAD_DIMS
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation
from tests.checkpoints.writer import make_checkpoint
from workers.kv_cache.caches import allocate_kv_caches
from workers.models.decoder import DecoderLM
from workers.models.registry import load_model_config
from workers.specs.model import ModelConfig
from workers.step.forward_batch import ForwardBatch
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import load_weights

BLOCK_SIZE = 8
BLOCKS_PER_SEQ = 8
MAX_SEQS = 8  # of a model with windows: then follow the blocks of layers with a window

SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


def make_batch(new_ids: list[list[int]], contexts: list[int], padding: int = 0) -> ForwardBatch:
    """Sequence i continues after contexts[i] cached tokens with new_ids[i]; single tokens first."""
    lens = [len(ids) for ids in new_ids]
    assert sorted(lens, key=lambda n: n != 1) == lens, "decodes come first"
    table = np.arange(len(lens) * BLOCKS_PER_SEQ).reshape(len(lens), BLOCKS_PER_SEQ)
    positions = [c + i for n, c in zip(lens, contexts, strict=True) for i in range(n)]
    seqs = [seq for seq, n in enumerate(lens) for _ in range(n)]
    slots = [
        table[seq, pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE
        for seq, pos in zip(seqs, positions, strict=True)
    ]
    flat = [token for ids in new_ids for token in ids]
    ends = np.cumsum([0, *lens])
    rows = np.arange(len(lens))
    return ForwardBatch(
        num_tokens=len(flat),
        num_token_non_padded=len(flat),
        num_seqs=len(lens),
        num_single_rows=lens.count(1),
        input_ids=torch.tensor(flat + [0] * padding, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_table=torch.from_numpy(table),
        window_slot_mapping=torch.tensor(slots, dtype=torch.int64)
        + MAX_SEQS * BLOCKS_PER_SEQ * BLOCK_SIZE,
        window_block_table=torch.from_numpy(table + MAX_SEQS * BLOCKS_PER_SEQ),
        seq_lens_cpu=np.array([n + c for n, c in zip(lens, contexts, strict=True)], np.int32),
        query_start_loc_cpu=ends.astype(np.int32),
        logits_indices=torch.from_numpy(ends[1:] - 1),
        sampling_rows=torch.from_numpy(rows),
        sampling_rows_cpu=rows,
        sampling_positions_cpu=np.array([n + c for n, c in zip(lens, contexts, strict=True)]),
        state_slots=torch.from_numpy(rows + 1),
    )


class OneRank:
    """A loaded model with every expert on one rank, and empty caches."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        max_seqs: int = MAX_SEQS,
        device: str = "cpu",
        backend: type[Attention] | None = None,
        grouped_gemm: GroupedGemm | None = None,
        config: ModelConfig | None = None,
        **options: Any,
    ):
        """config: of a model with random weights; None: the checkpoint's own. backend: None: a reference."""
        drawn = config is not None
        config = self.config = config or load_model_config(path)
        latent = any(spec.mla is not None for spec in config.attention_specs)
        backend = backend or (MlaAttention if latent else SdpaAttention)
        self.attention = backend(config.attention_specs, BLOCK_SIZE)
        groups = backend.kv_groups(config.attention_specs)
        seqs = max_seqs if config.window is None else 2 * MAX_SEQS
        blocks = seqs * BLOCKS_PER_SEQ, BLOCK_SIZE
        self.attention.bind(allocate_kv_caches(groups, *blocks, dtype, torch.device(device)))
        grouped_gemm = grouped_gemm or ReferenceGroupedGemm()
        backends = self.backends = Backends(
            LocalAllToAll(
                Permutation(
                    range(config.num_experts),
                    num_experts=config.num_experts,
                    device=device,
                    alignment=grouped_gemm.row_alignment,
                    unaligned_rows=grouped_gemm.unaligned_rows,
                    dtype=torch.int64,
                )
            ),
            grouped_gemm,
            self.attention,
            self._linear_attention(max_seqs, dtype, torch.device(device)),
        )
        expert_map = ContiguousMap(config.num_experts, 1)
        self.model = DecoderLM(
            config, backends, expert_map=expert_map, rank=0, device=device, dtype=dtype, **options
        )
        where = {"expert_map": expert_map, "rank": 0, "device": torch.device(device)}
        if drawn:
            draw_weights(self.model, config=config, **where)
        else:
            load_weights(self.model, path, config=config, **where)

    def _linear_attention(
        self, max_seqs: int, dtype: torch.dtype, device: torch.device
    ) -> LinearAttention | None:
        specs = self.config.linear_specs
        if not specs:
            return None
        on_gpu = device.type == "cuda" and all(spec.value_dim in HEAD_DIMS for spec in specs)
        name = "triton" if on_gpu else "torch"
        linear: LinearAttention = backend_class("linear_attention", name)(specs)
        linear.bind(linear.allocate(specs, 1 + max_seqs, dtype, device))
        return linear

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 [num_tokens, V]."""
        self.attention.plan(batch)
        if self.backends.linear_attention is not None:
            self.backends.linear_attention.plan(batch)
        hidden_TD = self.model.forward(batch)
        assert hidden_TD.shape == (len(batch.input_ids), self.config.hidden_size)
        adapters = batch.adapters
        if adapters is not None:
            adapters = adapters.take(torch.arange(batch.num_tokens))
        return self.model.compute_logits(hidden_TD[: batch.num_tokens], adapters=adapters)


def small_checkpoint(path: Path, **changes: Any) -> Path:
    """A random checkpoint of three small layers."""
    return make_checkpoint(path, **{**SMALL, **changes})
