"""Continuous batching on one rank: chooses the sequences of a step and their numbers of tokens. Pure bookkeeping.

The scheduler treats decodes and prefills alike: a sequence has known tokens and computed tokens, and a step computes
some of the difference. Order is by priority, then arrival. Running sequences come before waiting sequences. When the
cache is full, the last sequences in order give their blocks back and start again later (preemption by recompute), so
nothing is dropped. A waiting sequence takes nothing from a running sequence, whatever its priority.

A sequence that starts shares the blocks of the longest prefix in the cache, also its own blocks from before a
preemption; see `workers/kv_cache/prefix_cache.py`. If another sequence is computing the next block of
a sequence, the sequence waits, and later sequences may start before it.

A step may be scheduled before the tokens of the step before it are known. Blocks and rows still change owners at once,
because steps write and read them in the order of their launches.
"""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from workers.config import SchedulerConfig
from workers.kv_cache.block_pool import BlockPool
from workers.kv_cache.demand import KVDemand
from workers.kv_cache.prefix_cache import Prefix, PrefixCache
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.sampling import no_token
from workers.step.grammar import Grammar
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import InputBatch, Sequence
from workers.step.step_output import StepOutput
from workers.wire.request import EngineRequest, RequestOutput

MAX_HELD_BACK = 32  # waiting sequences that one step considers, of those that wait for blocks of other sequences

_by_order = attrgetter("order")


class Scheduler:
    """Waiting and running sequences of one rank, both in order, and their blocks.

    pool   blocks with the contents that an earlier scheduler has left, all free; a new pool of `num_blocks` without it
    window largest window of a layer: such layers have blocks of their own, which are released behind the window
    snapshots   of the states of linear attention; None: no layer has it
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        prefix_caching: bool = True,
        pool: BlockPool | None = None,
        window: int | None = None,
        snapshots: StateSnapshots | None = None,
    ):
        self._config = config
        self._max_model_len = max_model_len
        self._block_size = block_size
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self._window = window
        self.demand = KVDemand(block_size, window, config.max_num_batched_tokens)
        self.snapshots = snapshots
        self.prefixes = PrefixCache(
            self.pool,
            block_size,
            enabled=prefix_caching and (snapshots is None or snapshots.count > 0),
            window=window,
            snapshots=snapshots,
        )
        self.table = InputBatch(
            config.max_num_seqs,
            max_model_len,
            block_size,
            windows=window is not None,
            states=snapshots is not None,
        )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._admitted: list[Sequence] = []
        self._arrivals = itertools.count()
        self.num_preemptions = 0
        self.num_invalid = 0  # requests that ended because of their logits

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._by_id)

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> str | None:
        """Queue `request`; return the reason why it can never run here, or None.

        `grammar` is fresh: the emitted tokens of the request advance it here.
        """
        error = self._refusal(request) or _advance(grammar, request.emitted_token_ids)
        if error is None:
            seq = Sequence.from_request(request, self._max_model_len)
            seq.grammar = grammar
            seq.order = (request.priority, next(self._arrivals))
            self._by_id[request.request_id] = seq
            insort(self.waiting, seq, key=_by_order)
        return error

    def abort(self, request_id: str) -> Sequence | None:
        """Remove a request and free its blocks; return its sequence, None if the id is unknown or has finished."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return None
        self._finish(seq)
        return seq

    def close(self, launched: Iterable[ScheduledBatch] = ()) -> None:
        """Release all blocks and keep their contents in the pool, and snapshots of states, for another scheduler.

        launched   steps that were launched and will not be committed: what they were to write is forgotten
        """
        missing: Counter[Sequence] = Counter()
        for batch in launched:
            for seq, count in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True):
                missing[seq] += count
        for seq, count in missing.items():
            # A sequence that was preempted meanwhile has fewer computed tokens: more is forgotten.
            self.prefixes.forget(seq, max(0, seq.num_computed_tokens - count))
        if self.snapshots is not None:
            self.snapshots.close()
        while self.running:
            self._release(self.running.pop())

    @property
    def needs_tokens(self) -> bool:
        """Whether a running sequence needs the tokens of the launched steps before its next step."""
        return any(seq.num_pending and seq.needs_last_token for seq in self.running)

    def schedule(self, prefill_cap: int = 0) -> ScheduledBatch:
        """Choose this step's sequences and allocate their blocks.

        prefill_cap   most tokens of prompts, 0 = as many as fit; prompts that are not split have no cap

        While tokens are pending the batch may be empty although there is work: then `commit` comes first.
        """
        budget = self._config.max_num_batched_tokens
        prompts = prefill_cap if prefill_cap and self._config.chunked_prefill else budget
        work: list[tuple[Sequence, int]] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            seq = self.running[index]
            num_new = seq.num_remaining
            is_prompt = num_new > 1
            if seq.ends_with_pending or (is_prompt and not prompts):
                index += 1
                continue
            if is_prompt:  # the decodes behind it run in this step too
                behind = sum(later.num_remaining == 1 for later in self.running[index:])
                prompts = min(prompts, max(1, budget - behind))
            num_new = min(num_new, budget, prompts if is_prompt else 1)
            if self.snapshots is not None and self._config.chunked_prefill:
                num_new = self.prefixes.chunk(seq, num_new)
            if self._window is not None:
                self._leave_behind(seq)
            while not self._grow(seq, seq.num_computed_tokens + num_new):
                preempted = True
                if self._preempt_last() is seq:
                    break
            else:
                work.append((seq, num_new))
                budget -= num_new
                prompts -= num_new if is_prompt else 0
                index += 1
        # Admitting right after a preemption would only undo it.
        if not preempted:
            self._admit(min(budget, prompts), work)
        copies = () if self.snapshots is None else tuple(self.snapshots.copies)
        return _batch(work, self._admitted.copy(), copies)

    def launched(self, batch: ScheduledBatch) -> None:
        """Enter the launch of `batch`; `commit` follows for all launched batches in their order."""
        self._admitted.clear()
        self.table.launched(batch.seqs, batch.num_new_tokens, batch.samples)
        if self.snapshots is not None:
            self.snapshots.copies.clear()
            for seq in batch.seqs:
                self.prefixes.keep_state(seq)

    def commit(self, batch: ScheduledBatch, step: StepOutput) -> list[RequestOutput]:
        """Enter the output of a launched step. Sequences that have finished or were aborted get no output."""
        outputs: list[RequestOutput | None] = []
        tokens = iter(step.token_ids)
        for seq, samples in zip(batch.seqs, batch.samples.tolist(), strict=True):
            if seq.num_computed_tokens >= seq.next_full and not seq.finished:
                self.prefixes.register(seq)
            if samples:
                outputs.append(self._append(seq, next(tokens)))
        return step.attach(outputs)

    def _append(self, seq: Sequence, token_id: int) -> RequestOutput | None:
        seq.num_pending -= 1
        if seq.finished:
            return None
        request_id = seq.request.request_id
        if token_id < 0:
            cause = no_token.cause_of(token_id, seq.request.params)
            if cause == no_token.INVALID_LOGITS:
                self.prefixes.forget(seq)  # the K and V of its blocks may be NaN too
                self.num_invalid += 1
            self._finish(seq)
            reason = no_token.error_of(cause, seq.num_output_tokens)
            return RequestOutput(request_id, [], "error", reason)
        error = None if seq.grammar is None else seq.grammar.advance(token_id)
        if error is not None:
            self._finish(seq)
            return RequestOutput(request_id, [], "error", error)
        self.table.append_token(seq, token_id)
        finish_reason = seq.finish_reason()
        if finish_reason is not None:
            self._finish(seq)
        num_cached, seq.num_cached_tokens = seq.num_cached_tokens, 0  # reported once
        return RequestOutput(request_id, [token_id], finish_reason, num_cached_tokens=num_cached)

    def _refusal(self, request: EngineRequest) -> str | None:
        length = len(request.prompt_token_ids)
        if not 0 < length < self._max_model_len:
            return f"prompt of {length} tokens; must be 1 to {self._max_model_len - 1}"
        total = min(length + request.params.max_tokens, self._max_model_len)
        need = self.demand.blocks(total)
        if need > self.pool.num_blocks:
            return (
                f"prompt of {length} tokens plus up to {total - length} new ones needs {need} KV blocks; "
                f"this rank has {self.pool.num_blocks} (cache.num_blocks)"
            )
        num_emitted = len(request.emitted_token_ids)
        if num_emitted and num_emitted >= total - length:
            return f"{num_emitted} tokens were emitted of at most {total - length}: the request has ended"
        return None

    def _admit(self, budget: int, work: list[tuple[Sequence, int]]) -> None:
        index = 0  # sequences before it wait for blocks of another sequence
        while index < min(len(self.waiting), MAX_HELD_BACK) and budget:
            if len(self.running) == self._config.max_num_seqs:
                break
            seq = self.waiting[index]
            # A preempted sequence needs all its tokens to be known.
            cached = None if seq.num_pending else self.prefixes.find(seq)
            if cached is None:
                index += 1
                continue
            num_remaining = seq.num_tokens - len(cached.blocks) * self._block_size
            num_new = min(num_remaining, budget)
            if num_new < num_remaining and not self._config.chunked_prefill:
                break
            # There must be blocks for all known tokens, so that a prompt that starts can finish.
            need = self.demand.blocks(seq.num_tokens) - len(cached.both)
            if need > self.pool.num_free_besides(cached.both):
                break
            del self.waiting[index]
            self._start(seq, cached, num_new)
            if self.snapshots is not None and self._config.chunked_prefill:
                num_new = self.prefixes.chunk(seq, num_new)
            work.append((seq, num_new))
            budget -= num_new

    def _start(self, seq: Sequence, cached: Prefix, num_new: int) -> None:
        """Run `seq` from the end of its `cached` blocks, with blocks for all of its tokens; `num_new` come first.

        Layers with a window get blocks for these tokens alone.
        """
        self.pool.share(cached.both)
        num_cached = len(cached.blocks)
        need = self._blocks_for(seq.num_tokens) - num_cached
        seq.block_ids = cached.blocks + self.pool.allocate(need)
        seq.num_computed_tokens = num_cached * self._block_size
        if self._window is not None:
            need = self._blocks_for(seq.num_computed_tokens + num_new) - num_cached
            seq.window_first = num_cached - len(cached.window_blocks)
            seq.window_ids = cached.window_blocks + self.pool.allocate(need)
        self.table.add(seq)
        self.prefixes.started(seq, cached)
        self._admitted.append(seq)
        insort(self.running, seq, key=_by_order)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate blocks up to `num_tokens` tokens of `seq`; return False if the pool is empty."""
        while len(seq.block_ids) * self._block_size < num_tokens:
            if not self.pool.num_free:
                return False
            self.table.append_block(seq, self.pool.allocate(1)[0])
        if self._window is not None:
            while (seq.window_first + len(seq.window_ids)) * self._block_size < num_tokens:
                if not self.pool.num_free:
                    return False
                self.table.append_window_block(seq, self.pool.allocate(1)[0])
        return True

    def _leave_behind(self, seq: Sequence) -> None:
        """Release the blocks that the windows of the next tokens of `seq` do not touch; the prefix cache keeps them."""
        first = self.prefixes.first_in_window(seq.num_computed_tokens)
        count = first - seq.window_first
        if count > 0:
            if seq.num_computed_tokens >= seq.next_full:
                self.prefixes.register(seq)
            self.pool.release(seq.window_ids[:count])
            seq.window_ids, seq.window_first = seq.window_ids[count:], first

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        self._release(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, seq, key=_by_order)
        return seq

    def _finish(self, seq: Sequence) -> None:
        seq.finished = True
        if seq.row >= 0:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        del self._by_id[seq.request.request_id]

    def _release(self, seq: Sequence) -> None:
        if seq in self._admitted:
            self._admitted.remove(seq)
        self.prefixes.stopped(seq)
        self.pool.release(seq.block_ids, self.prefixes.num_useful(seq))
        self.pool.release(seq.window_ids)
        seq.block_ids, seq.window_ids, seq.window_first = [], [], 0
        self.table.remove(seq)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _advance(grammar: Grammar | None, token_ids: list[int]) -> str | None:
    """Advance `grammar` by `token_ids`; return its error, or None."""
    if grammar is None:
        return None
    return next(filter(None, map(grammar.advance, token_ids)), None)


def _batch(
    work: list[tuple[Sequence, int]], admitted: list[Sequence], copies: tuple[tuple[int, int], ...]
) -> ScheduledBatch:
    """Return a batch in which sequences with one new token come first, because attention needs this order."""
    decodes = [item for item in work if item[1] == 1]
    extends = [item for item in work if item[1] != 1]
    ordered = decodes + extends
    seqs = [seq for seq, _ in ordered]
    num_new = np.array([num_new for _, num_new in ordered], dtype=np.int64)
    samples = np.array([num_new == seq.num_remaining for seq, num_new in ordered], dtype=bool)
    num_tokens = sum(count for _, count in work)
    decodes_next = any(
        seq.num_tokens + seq.num_pending + 1 < seq.max_num_tokens
        for seq, drawn in zip(seqs, samples.tolist(), strict=True)
        if drawn
    )
    return ScheduledBatch(
        seqs, num_new, num_tokens, len(decodes), samples, admitted, decodes_next, copies
    )
