"""Latents that decodes share, by flashinfer: one sequence of many query rows for each group of decodes.

Knows nothing of the decodes' own latents. R rows, a decode each; H heads, C values of a latent, r rotated values, P
groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.base import AttentionBatch
from kernels.attention.flashinfer_decodes import Pages
from kernels.attention.shared_prefixes import MAX_GROUPS, SharedPrefixes
from kernels.host.host_copy import fill

# Query heads of a sequence from which flashinfer launches pairs of blocks: a graph has one launch for all plans.
PAIRED_ROWS = 65


@dataclass(frozen=True)
class _Stack:
    """Where rows are.

    pages    int32, the shared pages of all groups
    rows     int64 [R]: the decodes of all groups, group by group; behind them any
    places   int64 [R]: of each decode in `rows`, R for one that shares nothing
    """

    pages: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


class SharedLatents:
    """A wrapper of flashinfer, planned for one forward at a time.

    plan    plans `wrapper` for (rows, pages, tokens) of each sequence, as flashinfer takes them
    """

    def __init__(
        self,
        wrapper: Any,
        plan: Callable[[Any, np.ndarray, torch.Tensor, torch.Tensor, np.ndarray], None],
        list_pages: Callable[..., None],
        block_size: int,
        device: torch.device,
    ):
        self._wrapper, self._plan, self._list_pages = wrapper, plan, list_pages
        self._block_size, self._device = block_size, device
        self._buffers: _Stack | None = None
        self._stack: _Stack | None = None

    def reserve_graphs(self, max_rows: int, max_blocks: int) -> None:
        """Allocate what captured forwards of up to `max_rows` rows read."""
        pages = torch.zeros(MAX_GROUPS * max_blocks, dtype=torch.int32, device=self._device)
        rows = torch.zeros(2, max_rows, dtype=torch.int64, device=self._device)
        self._buffers = _Stack(pages, rows[0], rows[1])

    def plan(self, batch: AttentionBatch, shared: SharedPrefixes) -> None:
        """Plan the groups of a batch, outside of graphs."""
        num_rows = batch.num_single_rows
        pages = Pages(shared.tokens, self._block_size)
        rows = torch.empty(2, num_rows, dtype=torch.int64, device=self._device)
        new = torch.empty(pages.total, dtype=torch.int32, device=self._device)
        self._fill(batch, shared, pages, _Stack(new, rows[0], rows[1]))

    def plan_graph(
        self, batch: AttentionBatch, shared: SharedPrefixes | None, num_rows: int
    ) -> None:
        """Plan for a graph of `num_rows` rows; None: no decode shares latents."""
        assert self._buffers is not None, "reserve_graphs comes first"
        buffers = self._buffers
        stack = _Stack(buffers.pages, buffers.rows[:num_rows], buffers.places[:num_rows])
        if shared is not None:
            self._fill(batch, shared, Pages(shared.tokens, self._block_size), stack)
            return
        # All rows are one sequence without tokens.
        self._stack = stack
        stack.places.fill_(num_rows)
        ends, nothing = np.array([0, num_rows], np.int32), np.zeros(1, np.int32)
        self._plan(self._wrapper, ends, torch.zeros(2, dtype=torch.int32), stack.pages, nothing)

    def _fill(
        self, batch: AttentionBatch, shared: SharedPrefixes, pages: Pages, stack: _Stack
    ) -> None:
        num_rows = len(stack.rows)
        rows, places = np.zeros(num_rows, np.int64), np.full(num_rows, num_rows, np.int64)
        rows[: len(shared.rows)] = shared.rows
        places[shared.rows] = np.arange(len(shared.rows))
        fill(stack.rows, rows)
        fill(stack.places, places)
        assert pages.total <= len(stack.pages), "reserve_graphs was given fewer blocks"
        pages.ship(stack.pages)
        firsts = stack.rows.index_select(0, self._there(shared.starts[:-1]))
        self._list_pages(batch.block_table.index_select(0, firsts), pages.starts, stack.pages)
        self._plan(self._wrapper, shared.starts, pages.starts_cpu, stack.pages, shared.tokens)
        self._stack = stack

    def _there(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device, non_blocking=True)

    def run(
        self,
        q_RHC: torch.Tensor,
        q_RHr: torch.Tensor,
        latents: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention of each row to the latents it shares, [R, H, C], and log-sum-exps of base 2, [R, H].

        A row that shares nothing has zeros and -inf.
        """
        stack = self._stack
        assert stack is not None and len(stack.rows) == len(q_RHC)
        count, heads, rank = q_RHC.shape
        o_SHC = q_RHC.new_empty(count + 1, heads, rank)
        lse_SH = q_RHC.new_empty(count + 1, heads, dtype=torch.float32)
        o_SHC[count].zero_()
        lse_SH[count].fill_(float("-inf"))
        queries = (part.index_select(0, stack.rows) for part in (q_RHC, q_RHr))
        outputs = {"out": o_SHC[:count], "lse": lse_SH[:count]}
        self._wrapper.run(*queries, *latents, **outputs, return_lse=True)
        return o_SHC.index_select(0, stack.places), lse_SH.index_select(0, stack.places)


def own_latents(
    batch: AttentionBatch, shared: SharedPrefixes | None, block_size: int
) -> tuple[np.ndarray, torch.Tensor]:
    """Return lengths and block table of the decodes behind the latents that they share."""
    lens = batch.seq_lens_cpu[: batch.num_single_rows]
    table = batch.block_table[: batch.num_single_rows]
    if shared is None:
        return lens, table
    tokens = shared.tokens_of_rows(len(lens))
    firsts = torch.from_numpy(tokens.astype(np.int64) // block_size)
    columns = torch.arange(table.shape[1], device=table.device)
    columns = firsts.to(table.device, non_blocking=True)[:, None] + columns
    return lens - tokens, table.gather(1, columns.clamp_(max=table.shape[1] - 1))
