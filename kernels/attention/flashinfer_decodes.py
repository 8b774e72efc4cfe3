"""How decodes are planned for flashinfer: lists of pages, the cuts of long sequences, fixed addresses for graphs.

flashinfer's schedule cuts sequences into chunks, which blocks of threads compute side by side. By default it cuts only
when there are fewer sequences than blocks. Then 126 sequences of 512 tokens wait for two of 32768: 456 us, where chunks
of twice the mean length take 93 us (H200, Qwen3-30B-A3B's shapes).

R rows, a decode each; the last rows of a graph may be empty.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from kernels.attention.base import AttentionBatch
from kernels.interface.attention_spec import AttentionSpec

# Rows of a tile (query heads times query tokens) that flashinfer has, by the heads that share a KV head.
TILES = (16, 64, 128)
ALIGNMENT_BYTES = 2**16  # flashinfer may skip up to this much of a workspace
# One block of threads reads a whole sequence at 12 ns a token; a cut costs 5 us. So sequences are left whole if the
# longest has at most UNCUT_TOKENS more tokens than UNCUT_SHARES even shares of all blocks. Of 60 mixtures, 1 to 64 rows
# of 32 to 16,384 tokens, one was 8 % slower whole than cut, 59 at most 3 % (H200, Qwen3-30B-A3B's shapes).
UNCUT_TOKENS = 450
UNCUT_SHARES = 1.9

Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class Shape:
    """What plans need of the layers, the cache and the GPU.

    block_size  tokens of a page
    dtype       of q, k, v and the cache
    num_blocks  blocks of threads that flashinfer aims at when it cuts long sequences
    """

    spec: AttentionSpec
    block_size: int
    dtype: torch.dtype
    num_blocks: int

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """Return heads, KV heads, head dim and page size, in the order of flashinfer's plans."""
        spec = self.spec
        return spec.num_heads, spec.num_kv_heads, spec.head_dim, self.block_size

    @property
    def types(self) -> dict[str, Any]:
        """Return keyword arguments of flashinfer's plans."""
        return {
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "sm_scale": self.spec.scale,
        }

    @property
    def tile(self) -> int:
        """Return the rows of a decode's tile."""
        return next(tile for tile in TILES if tile >= self.spec.group_size or tile == TILES[-1])

    def chunk_bytes(self, tile: int) -> int:
        """Return the bytes of a chunk's partial results as flashinfer counts them: float32 [tile, H, d + 1]."""
        return 4 * tile * self.spec.num_heads * (self.spec.head_dim + 1)

    def graph_chunks(self, num_rows: int) -> int:
        """Return flashinfer's bound on the chunks of a graph's decodes."""
        return -(-num_rows * self.spec.group_size // self.tile) + num_rows - 1


class Pages:
    """The pages of each sequence in flashinfer's form, on the host and, after `ship`, on the device.

    starts         int32 [R + 1]     index in `pages` of each sequence's first page; rows without a sequence have none
    last_lens      int32 [R]         tokens in each sequence's last page
    query_starts   int32 [R + 1]     each sequence's first row of q, if given; rows without a sequence have none
    lens           int32 [R]         tokens of each sequence, on the host alone
    pages          int32 [>= total]  pages of all sequences, in order
    """

    def __init__(
        self,
        seq_lens_cpu: np.ndarray,
        block_size: int,
        num_rows: int | None = None,
        query_starts_cpu: np.ndarray | None = None,
    ):
        """Take the lengths of S <= R sequences, and where their rows of q start, int32 [S + 1]."""
        num_seqs = len(seq_lens_cpu)
        self.num_rows = num_rows = num_seqs if num_rows is None else num_rows
        self._queries = query_starts_cpu is not None
        num_pages = -(-seq_lens_cpu // block_size)
        numbers = np.zeros(4 * num_rows + 2, np.int32)
        starts, last_lens, query_starts, lens = _parts(numbers, num_rows)
        np.cumsum(num_pages, out=starts[1 : num_seqs + 1])
        starts[num_seqs + 1 :] = starts[num_seqs]
        last_lens[:num_seqs] = seq_lens_cpu - (num_pages - 1) * block_size
        if query_starts_cpu is not None:
            query_starts[: num_seqs + 1] = query_starts_cpu
            query_starts[num_seqs + 1 :] = query_starts_cpu[-1]
        lens[:num_seqs] = seq_lens_cpu
        self.total = int(starts[-1])
        self._numbers_cpu = torch.from_numpy(numbers)
        parts = _parts(self._numbers_cpu, num_rows)
        self.starts_cpu, self.last_lens_cpu, self.query_starts_cpu, self.lens_cpu = parts

    def ship(self, pages: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Start the copy of starts, last_lens and query_starts to the device, into `lengths` or a new tensor.

        `pages` is kept; the caller fills it. `lengths` has 2R + 1 elements or more, with query starts 3R + 2.
        """
        count = 3 * self.num_rows + 2 if self._queries else 2 * self.num_rows + 1
        if lengths is None:
            lengths = torch.empty(count, dtype=torch.int32, device=pages.device)
        lengths[:count].copy_(self._numbers_cpu[:count], non_blocking=True)
        self.pages = pages
        self.starts = lengths[: self.num_rows + 1]
        self.last_lens = lengths[self.num_rows + 1 : 2 * self.num_rows + 1]


class PageBuffers:
    """`Pages` at fixed addresses."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device):
        self.lengths = torch.zeros(3 * num_rows + 2, dtype=torch.int32, device=device)
        self.pages = torch.zeros(max_pages, dtype=torch.int32, device=device)

    def of(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Return the buffers of `Pages` of `num_rows` rows, under the names of wrappers' arguments."""
        starts, last_lens, *_ = _parts(self.lengths, num_rows)
        return {
            "paged_kv_indptr": starts,
            "paged_kv_last_page_len": last_lens,
            "paged_kv_indices": self.pages,
        }

    def query_starts(self, num_rows: int) -> torch.Tensor:
        """Return the buffer of query starts of `Pages` of `num_rows` rows."""
        return _parts(self.lengths, num_rows)[2]


def _parts(numbers: Numbers, num_rows: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the views of starts, last_lens, query_starts and lens of `num_rows` rows, as far as `numbers` has them."""
    ends = num_rows + 1, 2 * num_rows + 1, 3 * num_rows + 2, 4 * num_rows + 2
    return (
        numbers[: ends[0]],
        numbers[ends[0] : ends[1]],
        numbers[ends[1] : ends[2]],
        numbers[ends[2] : ends[3]],
    )


def chunk_pages(
    num_pages: np.ndarray, num_rows: int, max_chunks: int, num_blocks: int
) -> int | None:
    """Return the longest chunk, in pages, with which there are at most `max_chunks` chunks, or None.

    None: no sequence is longer, or flashinfer's own cut, into up to `num_blocks` chunks, is finer. num_pages is int
    [up to R]; an empty row has a chunk too.
    """
    max_chunks = min(max_chunks, num_rows + num_rows // 2)
    if max_chunks <= max(num_blocks, num_rows):
        return None
    chunk = -(-int(num_pages.sum()) // (max_chunks - num_rows))
    return chunk if int(num_pages.max(initial=0)) > chunk else None


def few_are_even(seq_lens: np.ndarray, num_blocks: int) -> bool:
    """Return whether to leave decodes whole that are fewer than blocks of threads; seq_lens is int [up to R]."""
    share = int(seq_lens.sum()) / num_blocks
    return int(seq_lens.max(initial=0)) <= UNCUT_TOKENS + UNCUT_SHARES * share


def prompts_are_new(batch: AttentionBatch) -> bool:
    """Return whether no sequence behind the decodes has tokens from earlier forwards."""
    prompts = slice(batch.num_single_rows, batch.num_seqs)
    new = np.diff(batch.query_start_loc_cpu[batch.num_single_rows : batch.num_seqs + 1])
    return bool((batch.seq_lens_cpu[prompts] == new).all())


def plan_new_prompts(wrapper: Any, starts: torch.Tensor, shape: Shape) -> None:
    """Plan a wrapper that reads K and V from the new rows; `starts` are the prompts' first rows, of q, k and v."""
    spec = shape.spec
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    wrapper.plan(starts, starts, *heads, causal=True, **shape.types)


class Decodes:
    """A decode wrapper of flashinfer with its plan.

    cuts   False: no sequence is ever cut. Each row has one chunk then and the launch depends on the number of rows
           only, so a wrapper without use_cuda_graph can be captured. A wrapper with it merges chunks in every call,
           which costs 5 to 8 us.
    """

    def __init__(self, wrapper: Any, fast_plan: Any, *, cuts: bool = True):
        self.wrapper = wrapper
        self._fast_plan, self._cuts = fast_plan, cuts
        self._planned = False
        self._row_starts: torch.Tensor | None = None

    def plan(self, pages: Pages, num_rows: int, chunk: int | None, shape: Shape) -> None:
        """Plan the first `num_rows` rows; `chunk` as `chunk_pages` returns it."""
        starts_cpu = pages.starts_cpu[: num_rows + 1]
        last_lens_cpu = pages.last_lens_cpu[:num_rows]
        used = pages.pages[: int(starts_cpu[-1])]
        options = {"fixed_split_size": chunk, "disable_split_kv": not self._cuts, **shape.types}
        if not self._planned:
            self.wrapper.plan(starts_cpu, used, last_lens_cpu, *shape.arguments, **options)
            self._planned = True
        # The wrapper's own plan reads each length in Python, 2 us each. The fast plan leaves copies to the caller.
        starts, last_lens = pages.starts[: num_rows + 1], pages.last_lens[:num_rows]
        self._fast_plan(
            self.wrapper,
            starts,
            used,
            last_lens_cpu,
            *shape.arguments,
            global_override_indptr_cpu=starts_cpu,
            **options,
        )
        self.wrapper._paged_kv_last_page_len_buf = last_lens
        if not self._cuts:
            # Each plan makes a new copy, but a captured graph reads the first.
            if self._row_starts is None:
                self._row_starts = self.wrapper._qo_indptr_buf
            self.wrapper._qo_indptr_buf = self._row_starts
