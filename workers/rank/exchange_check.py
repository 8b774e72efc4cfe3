"""Checks an all-to-all against arithmetic, and times it: `phalanx check --run`. All ranks call it alike.

Each rank draws the rows of all ranks from their numbers, and so has the numbers of rows that its experts have to get.
An expert multiplies its rows by a factor of its own, so a row that has been to a wrong expert changes the result. Knows
nothing of models, Ray or the transport of rows.

T tokens of a rank, D hidden, K experts per token, E experts of all ranks, e local experts, R routed rows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kernels.all2all.base import AllToAll, ExpertInput, MaskedInput, sum_partials
from kernels.block_fp8 import BLOCK
from kernels.interface.backend import BackendShape
from kernels.pending import Pending
from kernels.routing.expert_map import ExpertMap

WARM_UP, ROUNDS = 3, 20
MOST_TOKENS = 4096
# Largest error of a row, as a share of its norm. Rows in FP8 are rounded to 4 bits of mantissa before they travel.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
FP8_TOLERANCE = 8e-2

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x_TD, topk_idx_TK, topk_weights_TK


@dataclass(frozen=True)
class Measured:
    """One number of rows of one rank.

    layout       of the rows of the experts: `contiguous`, or `masked` of a low-latency mode
    error        largest error of a row, as a share of its norm
    wrong        what differs from the reference; "" if nothing does
    ..._s        median seconds, up to the result on the device
    sent_bytes   of rows that this rank sends to other ranks in a dispatch, each row once to each rank
    """

    num_tokens: int
    layout: str
    error: float
    wrong: str
    dispatch_s: float
    combine_s: float
    sent_bytes: int


def sizes(most: int) -> list[int]:
    """Return the rows of a rank that are checked: of decodes and of prompts, up to `most`."""
    return [size for size in (1, 32, 128, 512, 1024) if size < most] + [min(most, MOST_TOKENS)]


def check(
    all2all: AllToAll,
    shape: BackendShape,
    expert_map: ExpertMap,
    rank: int,
    device: torch.device,
    *,
    fp8: bool,
) -> list[Measured]:
    """Check and time `all2all` with each of `sizes`. Collective.

    fp8   rows travel in FP8
    """
    one = _Check(all2all, shape, expert_map, rank, device, fp8)
    return [one.run(num_tokens) for num_tokens in sizes(shape.max_num_tokens)]


def draw(shape: BackendShape, rank: int, num_tokens: int) -> Drawn:
    """Return the rows of a rank, on the CPU. The last quarter is padding, and row 0 has one expert fewer."""
    generator = torch.Generator().manual_seed(1000 * num_tokens + rank)
    x_TD = torch.randn(num_tokens, shape.hidden_size, generator=generator).to(shape.dtype)
    scores_TE = torch.rand(num_tokens, shape.num_experts, generator=generator)
    ids_TK = scores_TE.topk(shape.top_k, dim=-1).indices
    if num_tokens >= 4:
        ids_TK[-(num_tokens // 4) :] = -1
        ids_TK[0, 0] = -1
    return x_TD, ids_TK, torch.rand(num_tokens, shape.top_k, generator=generator)


def factors(num_experts: int) -> torch.Tensor:
    """Return float32 [E] of 0.5 to 1.5: the factor of each expert, far from those of its neighbours."""
    return 0.5 + torch.arange(num_experts) * 0.6180339887 % 1


class _Check:
    def __init__(
        self,
        all2all: AllToAll,
        shape: BackendShape,
        expert_map: ExpertMap,
        rank: int,
        device: torch.device,
        fp8: bool,
    ):
        self._all2all, self._shape, self._rank, self._device = all2all, shape, rank, device
        self._limit = FP8_TOLERANCE if fp8 else TOLERANCE[shape.dtype]
        self._row_bytes = shape.hidden_size * (1 if fp8 else shape.dtype.itemsize)
        self._own, self._ends = expert_map.slots_of(rank), torch.tensor(expert_map.starts[1:])
        self._factor_E = factors(shape.num_experts)
        self._factor_e = self._factor_E[self._own.start : self._own.stop].to(device)

    def run(self, num_tokens: int) -> Measured:
        """Return the figures of one number of rows."""
        drawn = draw(self._shape, self._rank, num_tokens)
        inputs = tuple(part.to(self._device) for part in drawn)
        routed = self._all2all.dispatch(*inputs).wait()
        wrong = self._wrong_rows(routed, num_tokens)
        y = self._experts(routed)
        out_TD = sum_partials(self._all2all.combine(y, routed.handle).wait())
        error, of_sums = self._wrong_sums(out_TD, drawn)
        if not wrong and not of_sums:
            of_sums = self._wrong_replay(inputs, out_TD)
        dispatch_s, combine_s = self._times(inputs)
        layout = "masked" if isinstance(routed, MaskedInput) else "contiguous"
        sent = self._sent_rows(drawn[1]) * self._row_bytes
        return Measured(num_tokens, layout, error, wrong or of_sums, dispatch_s, combine_s, sent)

    def _experts(self, routed: ExpertInput | MaskedInput) -> torch.Tensor:
        """Return the rows times the factors of their experts, in the model's dtype; unused rows are undefined."""
        dtype = self._shape.dtype
        if isinstance(routed, MaskedInput):
            x_eMD = routed.x_eMD.float()
            if routed.scale_eMS is not None:
                blocks_eMS1 = routed.scale_eMS.unsqueeze(3)
                x_eMD = x_eMD * blocks_eMS1.expand(-1, -1, -1, BLOCK).flatten(2)
            return (x_eMD * self._factor_e[:, None, None]).to(dtype).contiguous()
        x_RD = routed.permuted_rows()
        ends_e = routed.offs_e if routed.routing is None else routed.routing.ends_e
        row_R = torch.arange(len(x_RD), device=self._device, dtype=ends_e.dtype)
        expert_R = torch.searchsorted(ends_e, row_R, right=True).clamp_max(len(self._own) - 1)
        return (x_RD.float() * self._factor_e[expert_R].unsqueeze(1)).to(dtype)

    def _wrong_rows(self, routed: ExpertInput | MaskedInput, num_tokens: int) -> str:
        """Return what differs in the numbers of rows of this rank's experts, or ""."""
        drawn = [draw(self._shape, other, num_tokens)[1] for other in range(self._shape.num_ranks)]
        ids_P = torch.cat([ids_TK.flatten() for ids_TK in drawn])
        counts_E = torch.bincount(ids_P[ids_P >= 0], minlength=self._shape.num_experts)
        expected = counts_E[self._own.start : self._own.stop].cumsum(0).tolist()
        found = routed.offs_e.tolist()
        if found == expected:
            return ""
        return f"the experts got {found[-1]} rows, expected are {expected[-1]}"

    def _wrong_sums(self, out_TD: torch.Tensor, drawn: Drawn) -> tuple[float, str]:
        """Return the largest error of a row, and what differs, or ""."""
        x_TD, ids_TK, weights_TK = drawn
        share_TK = weights_TK * self._factor_E[ids_TK.clamp_min(0)] * (ids_TK >= 0)
        expected_TD = x_TD.float() * share_TK.sum(1, keepdim=True)
        found_TD = out_TD.float().cpu()
        if found_TD.shape != expected_TD.shape:
            return 1.0, f"sums have the shape {[*found_TD.shape]}"
        error_T = (found_TD - expected_TD).norm(dim=1) / expected_TD.norm(dim=1).clamp_min(1e-6)
        error_T = error_T.where(~error_T.isnan(), torch.inf)
        error = float(error_T.max())
        if error <= self._limit:
            return error, ""
        return error, f"row {int(error_T.argmax())} is off by {error:.2g} of its norm"

    def _wrong_replay(self, inputs: tuple[torch.Tensor, ...], expected_TD: torch.Tensor) -> str:
        """Return what differs where a CUDA graph dispatches and combines, or ""."""
        all2all, rows = self._all2all, len(inputs[0])
        if self._device.type != "cuda" or not all2all.graph:
            return ""
        if rows > all2all.graph_rows(self._shape):
            return ""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out_TD = sum_partials(self._exchange(inputs))
        out_TD.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(out_TD, expected_TD)
        graph.reset()
        return "" if same else "a CUDA graph gives other sums"

    def _exchange(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        routed = self._all2all.dispatch(*inputs).wait()
        return self._all2all.combine(self._experts(routed), routed.handle).wait()

    def _times(self, inputs: tuple[torch.Tensor, ...]) -> tuple[float, float]:
        """Return the median seconds of a dispatch and of a combine."""
        dispatched, combined = [], []
        for _ in range(WARM_UP + ROUNDS):
            seconds, routed = self._timed(self._all2all.dispatch, *inputs)
            dispatched.append(seconds)
            y = self._experts(routed)
            seconds, _ = self._timed(self._all2all.combine, y, routed.handle)
            combined.append(seconds)
        return median(dispatched[WARM_UP:]), median(combined[WARM_UP:])

    def _timed(self, call: Callable[..., Pending[Any]], *inputs: Any) -> tuple[float, Any]:
        self._synchronize()
        started = time.perf_counter()
        result = call(*inputs).wait()
        self._synchronize()
        return time.perf_counter() - started, result

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _sent_rows(self, ids_TK: torch.Tensor) -> int:
        """Return the rows that leave this rank, each counted once for each rank that gets it."""
        rank_TK = torch.bucketize(ids_TK, self._ends, right=True).where(ids_TK >= 0, -1)
        ranks = torch.arange(self._shape.num_ranks)
        goes_TR = (rank_TK.unsqueeze(2) == ranks).any(1)
        goes_TR[:, self._rank] = False
        return int(goes_TR.sum())
