"""Ranks for the tests of ubatches: a model, its ubatches, and exchanges and products that take a given time."""

from dataclasses import replace
from typing import Any

import torch

from kernels.all2all.base import AllToAll
from kernels.backends.select import Backends
from kernels.backends.ubatch import build_ubatch_backends
from kernels.grouped_gemm.base import GroupedGemm
from kernels.pending import Pending
from tests.unit.model_case import BLOCKS_PER_SEQ, make_batch
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.step.forward_batch import ForwardBatch
from workers.ubatch.batch_cuts import cut
from workers.ubatch.wrapper import UBatchWrapper

MAX_SEQS = 8
# (new tokens of each sequence, cached tokens of each) of every rank; the others of four ranks are idle.
STEPS: dict[str, list[tuple[list[int], list[int]]]] = {
    "extend": [([20, 17, 2], [0, 8, 30]), ([33], [0]), ([5, 9, 13], [0, 0, 16])],
    "decode": [([1] * 5, [3, 40, 1, 17, 8]), ([1] * 4, [9, 2, 60, 31]), ([1] * 8, [7] * 8)],
    "mixed": [([1, 1, 30], [3, 40, 9]), ([1, 25, 6], [12, 0, 0]), ([1] * 6, [5] * 6)],
    "straddles": [([41], [11]), ([37], [0]), ([2, 38], [1, 25])],
    "one_token_ubatches": [([1, 1], [3, 4]), ([2], [0]), ([1, 1], [0, 50])],
    "uneven": [([40], [0]), ([1] * 8 + [], [9] * 8), ([21, 3], [4, 0])],
    "idle": [([18, 4], [0, 3]), ([], []), ([], [])],
}


def batch_of(name: str, rank: int, num_rows: int | None = None) -> ForwardBatch:
    """This rank's part of a step, with the same ids in every call; padded to `num_rows`."""
    new, contexts = (STEPS[name] + [([], [])] * 8)[rank]
    generator = torch.Generator().manual_seed(100 + rank)
    ids = [torch.randint(256, (n,), generator=generator).tolist() for n in new]
    padding = max(0, (num_rows or 1) - sum(new))
    return make_batch(ids, contexts, padding)


def rows_of(name: str, num_ranks: int, num_ubatches: int) -> int:
    """Rows that all ranks run a ubatched step with."""
    return max(num_ubatches, *(sum(new) for new, _ in (STEPS[name] + [([], [])] * 8)[:num_ranks]))


class UbatchRank:
    """One rank's model, with kernels for whole steps and for ubatches over the same caches."""

    def __init__(self, rank: int, config: RankConfig, rendezvous: Rendezvous, num_ubatches: int):
        self._epoch = Epoch(RankProcess(rank, config), rendezvous, 30)
        self._epoch.load()
        self.model = self._epoch.model
        self.whole = self._epoch.backends
        process = self._epoch.process
        self.caches = process.caches.new_kv_caches(MAX_SEQS * BLOCKS_PER_SEQ)
        context = process.backend_context(self._epoch._peers.shared_memory)
        self.ubatches = build_ubatch_backends(process.selection, context, self.whole, num_ubatches)
        for backends in (self.whole, *self.ubatches):
            backends.attention.bind(self.caches)

    def fill_caches(self) -> None:
        """The same keys and values whenever it is called."""
        generator = torch.Generator().manual_seed(self._epoch.process.rank)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))

    @torch.inference_mode()
    def plain(self, batch: ForwardBatch, backends: Backends | None = None) -> torch.Tensor:
        """hidden_TD of one whole forward, with the rank's own kernels or others."""
        self.fill_caches()
        backends = backends or self.whole
        backends.attention.plan(batch)
        return self.model.with_backends(backends).forward(batch)

    @torch.inference_mode()
    def ubatched(self, batch: ForwardBatch, ubatches: list[Backends] | None = None) -> torch.Tensor:
        """hidden_TD of the alternating ubatches."""
        self.fill_caches()
        wrapper = UBatchWrapper(self.model, ubatches or self.ubatches)
        wrapper.plan(batch)
        return wrapper.forward(batch)

    @torch.inference_mode()
    def one_after_another(self, batch: ForwardBatch) -> torch.Tensor:
        """hidden_TD of the same ubatches, each run to its end before the next one begins."""
        self.fill_caches()
        found, count = [], len(self.ubatches)
        for backends, part in zip(self.ubatches, cut(batch, batch.num_rows, count), strict=True):
            backends.attention.plan(part)
            found.append(self.model.with_backends(backends).forward(part))
        return torch.cat(found)

    def close(self) -> None:
        self._epoch.process.close()


class Clock:
    """The time of a rank's thread, in which all but what a test slows down takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_until(self, moment: float) -> None:
        """Let the time pass until a moment, unless it has passed."""
        self.now = max(self.now, moment)


class Delayed(AllToAll):
    """Another exchange, whose results come `seconds` after it was called, whatever is computed meanwhile."""

    def __init__(self, inner: AllToAll, seconds: float, clock: Clock):
        self.name, self.needs_equal_tokens = inner.name, inner.needs_equal_tokens
        self._inner, self._seconds, self._clock = inner, seconds, clock

    def dispatch(self, *rows: torch.Tensor) -> Pending:
        return self._later(self._inner.dispatch(*rows))

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending:
        return self._later(self._inner.combine(y_RD, handle))

    def _later(self, pending: Pending) -> Pending:
        due = self._clock.now + self._seconds

        def finish() -> Any:
            self._clock.wait_until(due)
            return pending.result()

        return Pending(finish)


class Slow(GroupedGemm):
    """Another expert product that takes `seconds`."""

    def __init__(self, inner: GroupedGemm, seconds: float, clock: Clock):
        self.name, self._inner, self._seconds, self._clock = inner.name, inner, seconds, clock

    def __call__(self, *inputs: Any) -> torch.Tensor:
        self._clock.now += self._seconds
        return self._inner(*inputs)


def slowed(backends: Backends, clock: Clock, *, compute: float, delay: float) -> Backends:
    """Backends whose attention and experts take `compute` seconds each, and whose exchanges are `delay` under way."""
    attention = backends.attention
    attend = attention.__class__.__call__

    class SlowAttention(attention.__class__):
        def __call__(self, *inputs: Any) -> torch.Tensor:
            clock.now += compute
            return attend(self, *inputs)

    slow = object.__new__(SlowAttention)
    slow.__dict__.update(attention.__dict__)
    return replace(
        backends,
        all2all=Delayed(backends.all2all, delay, clock),
        grouped_gemm=Slow(backends.grouped_gemm, compute, clock),
        attention=slow,
    )


class Followed(AllToAll):
    """Another exchange; notes in `events` when it is called and when its result has arrived."""

    def __init__(self, inner: AllToAll, ubatch: int, events: list[tuple[str, str, int]]):
        self.name, self.needs_equal_tokens = inner.name, inner.needs_equal_tokens
        self._inner, self._ubatch, self._events = inner, ubatch, events

    def dispatch(self, *rows: torch.Tensor) -> Pending:
        return self._follow("dispatch", self._inner.dispatch(*rows))

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending:
        return self._follow("combine", self._inner.combine(y_RD, handle))

    def _follow(self, operation: str, pending: Pending) -> Pending:
        self._events.append(("called", operation, self._ubatch))

        def finish() -> Any:
            result = pending.result()
            self._events.append(("arrived", operation, self._ubatch))
            return result

        return Pending(finish)


def followed(backends: Backends, ubatch: int, events: list[tuple[str, str, int]]) -> Backends:
    """Backends whose exchanges are noted in `events`."""
    return replace(backends, all2all=Followed(backends.all2all, ubatch, events))
