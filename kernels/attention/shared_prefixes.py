"""Which decodes of a forward read leading blocks together, and whether that pays. Pure.

Such decodes attend to the shared blocks in one pass, with the queries of all of them stacked, so that K and V are read
once, and to their own blocks in another one. Both results are merged by their log-sum-exps ("cascade").

B sequences, S decodes that share, P groups.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from kernels.attention.batch import AttentionBatch
from kernels.interface.kv_layout import KVLayout

MAX_GROUPS = 32  # of a forward; bounds the buffers of CUDA graphs
# MiB of K and V that a layer on a GPU does not read again, from where a shared pass pays: the least that was faster in
# docs/results/gpu-cascade.json (one H200, 4 KV heads of 128), which `python -m scripts.bench.gpu_cascade` measures. The
# pass and its merge take 25 to 30 us of a layer. Meanwhile decodes read shared blocks again from the L2 cache, and the
# faster their kernel does so, the more reads make up for the pass: 9 TB/s by flashinfer, 6 TB/s by our kernel, and 3
# TB/s by our kernel where it converts e4m3.
FLASHINFER_MIB = (
    254  # 128 rows that share 1,024 tokens: 1.01 times as fast; 112 MiB of 8 rows: 0.86
)
TRITON_MIB = 112  # 8 rows that share 8,192 tokens: 1.20 times; 64 MiB of 128 rows: 0.69
TRITON_FP8_MIB = (
    56  # the same in e4m3, also with `flashinfer_fp8`: 1.08 times; less was not measured
)
LATENTS_MIB = 48  # not measured: an estimate from a pass of 12 us
GPU_GROUP_TOKENS = 256


@dataclass(frozen=True)
class SharingCost:
    """From where a shared pass pays, in tokens of K and V in a layer.

    group_tokens   that a group shares: fewer are not worth the partial results
    saved_tokens   reads that all groups save together: fewer are not worth the pass and the merge
    group_rows     decodes of a group, at least
    """

    group_tokens: int
    saved_tokens: int
    group_rows: int = 2

    @classmethod
    def on_gpu(cls, layout: KVLayout, saved_mib: int) -> Self:
        """Return the cost for layers with this cache, of values of 2 bytes or in e4m3, that pay from `saved_mib` on."""
        return cls(GPU_GROUP_TOKENS, saved_mib * 2**20 // layout.block_bytes(1, 2))

    @classmethod
    def of_triton(cls, layout: KVLayout) -> Self:
        """Return the cost for decodes of `triton` and `flashinfer_fp8`."""
        return cls.on_gpu(layout, TRITON_FP8_MIB if layout.in_bytes else TRITON_MIB)


@dataclass(frozen=True)
class SharedPrefixes:
    """The groups of decodes of a forward.

    rows     int32 [S]      the decodes of all groups, group by group
    starts   int32 [P + 1]  first of `rows` of each group
    tokens   int32 [P]      leading tokens that all decodes of a group share, whole blocks; each decode has more tokens
    """

    rows: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Decodes of each group, int [P]."""
        return np.diff(self.starts)

    @property
    def saved_tokens(self) -> int:
        """Tokens of K and V that a layer does not read again."""
        return int(((self.sizes - 1) * self.tokens.astype(np.int64)).sum())

    def tokens_of_rows(self, num_rows: int) -> np.ndarray:
        """Return int32 [num_rows], the tokens that each decode shares, 0 for none."""
        found = np.zeros(num_rows, np.int32)
        found[self.rows] = np.repeat(self.tokens, self.sizes)
        return found


def find_shared(batch: AttentionBatch, block_size: int, cost: SharingCost) -> SharedPrefixes | None:
    """Return the groups of the batch's decodes for which a shared pass pays, or None."""
    if batch.prefix_groups_cpu is None or batch.prefix_blocks_cpu is None:
        return None
    groups = batch.prefix_groups_cpu[: batch.num_single_rows]
    members = np.flatnonzero(groups >= 0).astype(np.int32)
    if len(members) < 2:
        return None
    members = members[np.argsort(groups[members], kind="stable")]
    cuts = np.flatnonzero(np.diff(groups[members])) + 1
    starts = np.concatenate(([0], cuts, [len(members)]))
    tokens = batch.prefix_blocks_cpu[members[starts[:-1]]] * np.int32(block_size)
    saved = (np.diff(starts) - 1) * tokens.astype(np.int64)
    taken = (np.diff(starts) >= cost.group_rows) & (tokens >= cost.group_tokens)
    if taken.sum() > MAX_GROUPS:
        taken[np.argsort(np.where(taken, saved, 0))[:-MAX_GROUPS]] = False
    if saved[taken].sum() < cost.saved_tokens or not taken.any():
        return None
    sizes = np.diff(starts)
    rows = members[np.repeat(taken, sizes)]
    ends = np.cumsum(sizes[taken])
    shared = SharedPrefixes(rows, np.concatenate(([0], ends)).astype(np.int32), tokens[taken])
    lens = batch.seq_lens_cpu[rows]
    assert (shared.tokens_of_rows(batch.num_single_rows)[rows] < lens).all(), (
        "a shared row has none of its own"
    )
    return shared
