"""Continuous batching on one rank: chooses the sequences of a step and their numbers of tokens. Pure bookkeeping.

The scheduler treats decodes and prefills alike: a sequence has known tokens and computed tokens, and a step computes
some of the difference. Order is by priority, then arrival. Running sequences come before waiting sequences. When the
cache is full, the last sequences in order give their blocks back and start again later (preemption by recompute), so
nothing is dropped. A waiting sequence takes nothing from a running sequence, whatever its priority.

A sequence that starts shares the memory of the longest prefix in the cache, also its own memory from before a
preemption; see `workers/kv_cache/manager.py`. If another sequence is computing the next block of
a sequence, the sequence waits, and later sequences may start before it.

A step may be scheduled before the tokens of the step before it are known. Blocks and rows still change owners at once,
because steps write and read them in the order of their launches.
"""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from workers.config import SchedulerConfig
from workers.kv_cache.group import Prefix
from workers.kv_cache.manager import KVCacheManager
from workers.scheduler.adapter_users import AdapterUsers
from workers.scheduler.commit import Commits, Committed
from workers.scheduler.image_queue import ImageQueue
from workers.scheduler.refusals import refusal_of
from workers.speculation.speculator import Speculator
from workers.speculation.step_times import StepSize
from workers.step.adapter_slots import AdapterSlots
from workers.step.grammar import Grammar, advance_all
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import (
    DECODE,
    PROMPT,
    VERIFY,
    InputBatch,
    ScheduledSequence,
    Sequence,
)
from workers.step.step_output import StepOutput
from workers.step.step_sync import StepPlan
from workers.wire.request import EngineRequest

MAX_HELD_BACK = 32  # waiting sequences that one step considers, of those that wait for blocks of other sequences

_by_order = attrgetter("order")


class Scheduler:
    """Waiting and running sequences of one rank, both in order.

    cache        memory of the running sequences, with the contents that an earlier scheduler has left, all free
    speculator   drafts tokens of sequences that decode; None: every sequence gets one token a step
    adapters     slots of LoRA adapters; None: no sequence has one
    images       sequences that wait for their images; None: no sequence has any
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, max_model_len: int):
        self._config = config
        self._max_model_len = max_model_len
        self.cache = cache
        self.table = InputBatch(config.max_num_seqs, max_model_len)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._admitted: list[Sequence] = []
        self._arrivals = itertools.count()
        self._blocked_by: int | None = None  # transfers that had ended when others left no memory
        self.num_preemptions = 0
        self._commits = Commits(cache, self.table, self._finish)
        self.speculator: Speculator | None = None
        self.adapters: AdapterSlots | None = None
        self.images: ImageQueue | None = None
        self._adapter_users = AdapterUsers()
        self._last: ScheduledBatch | None = None  # while its sequences keep their rows

    @property
    def num_invalid(self) -> int:
        """Requests that ended because of their logits."""
        return self._commits.num_invalid

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits for its turn, not for images, a load, or memory that transfers hold."""
        blocked = self._blocked_by is not None and self._blocked_by == self.cache.transfers_ended
        return not blocked and bool(self.running or self.waiting)

    @property
    def has_requests(self) -> bool:
        """Whether there are sequences, also such as wait for images or a load."""
        return bool(self._by_id)

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> str | None:
        """Queue `request`; return the reason why it can never run here, or None.

        `grammar` is fresh: the emitted tokens of the request advance it here.
        """
        limits = self.cache, self._max_model_len, self.adapters, self.images
        error = refusal_of(request, *limits) or advance_all(grammar, request.emitted_token_ids)
        if error is None:
            seq = Sequence.from_request(request, self._max_model_len)
            seq.grammar = grammar
            seq.order = (request.priority, next(self._arrivals))
            self._by_id[request.request_id] = seq
            if seq.images is None or self._holds_images(seq, self.cache.lookup(seq)):
                insort(self.waiting, seq, key=_by_order)
        return error

    def images_ready(self, request_id: str) -> str | None:
        """Queue a request with embeddings that the encoder has made; return why it ends instead, or None."""
        seq = None if self.images is None else self.images.take(request_id)
        if seq is None or seq.images is None:
            return None
        insort(self.waiting, seq, key=_by_order)
        error = seq.images.error
        if error is not None:
            self._finish(seq)
        return error

    def abort(self, request_id: str) -> Sequence | None:
        """Remove a request and free its memory; return its sequence, None if the id is unknown or has finished."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return None
        self._finish(seq)
        return seq

    def close(self, launched: Iterable[ScheduledBatch] = ()) -> None:
        """Release the memory of all sequences and keep its contents in the cache, for another scheduler.

        launched   steps that were launched and will not be committed: what they were to write is forgotten
        """
        missing: Counter[Sequence] = Counter()
        for batch in launched:
            for seq, count in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True):
                missing[seq] += count
        for seq, count in missing.items():
            # A sequence that was preempted meanwhile has fewer computed tokens: more is forgotten.
            self.cache.forget(seq, max(0, seq.num_computed_tokens - count))
        self.cache.close()
        while self.running:
            self._release(self.running.pop())
        for seq in self._by_id.values():
            if seq.images is not None:
                seq.images.release()

    @property
    def needs_tokens(self) -> bool:
        """Whether a running sequence needs the tokens of the launched steps before its next step is scheduled.

        A sequence of which only the next draw needs them does not. Drafts of a draft model follow tokens that only the
        device has; a grammar must read both, so sequences with grammars get drafts where no other sequence would wait.
        """
        pending = [seq for seq in self.running if seq.num_pending]
        if self.speculator is not None and self.speculator.uses_model:
            return bool(pending) and all(seq.grammar is not None for seq in pending)
        return any(seq.speculates or seq.has_unknown_length for seq in pending)

    def adapter_vote(self, batch: ScheduledBatch | None) -> dict[str, int]:
        """Return the fields of this rank's Vote that concern adapters."""
        if self.adapters is None:
            return {}
        return self._adapter_users.vote(has_rows=batch is not None and batch.has_adapters)

    def schedule(self, prefill_cap: int = 0) -> ScheduledBatch:
        """Choose this step's sequences and allocate their memory.

        prefill_cap   most tokens of prompts, 0 = as many as fit; prompts that are not split have no cap

        While tokens are pending the batch may be empty although there is work: then `commit` comes first.
        """
        budget = self._config.max_num_batched_tokens
        self._adapter_users.begin_step()
        self.settle()
        room = self._draft(budget)
        prompts = prefill_cap if prefill_cap and self._config.chunked_prefill else budget
        work: list[ScheduledSequence] = []
        num_preemptions, index = self.num_preemptions, 0
        while index < len(self.running) and budget:
            seq = self.running[index]
            kind = VERIFY if seq.draft_token_ids else seq.kind
            if kind is VERIFY:
                num_new = min(1 + len(seq.draft_token_ids), budget)
            elif seq.ends_with_pending or (kind is PROMPT and not prompts):
                index += 1
                continue
            elif kind is DECODE:
                num_new = 1
            else:  # the decodes behind it run in this step too
                others = (it for it in self.running[index:] if it.kind is not PROMPT)
                behind = sum(other.num_remaining for other in others)
                prompts = min(prompts, max(1, budget - behind))
                num_new = min(seq.num_remaining, prompts)
                if self._config.chunked_prefill:
                    num_new = self.cache.chunk(seq, num_new)
            if seq.num_computed_tokens + num_new + room > seq.capacity:
                num_new = self._grow(seq, num_new, room)
                if not num_new:
                    break
                kind = seq.kind
            work.append(seq.part(kind, num_new))
            budget -= num_new
            prompts -= num_new if kind is PROMPT else 0
            index += 1
        # Admitting right after a preemption would only undo it.
        if num_preemptions == self.num_preemptions:
            self._admit(min(budget, prompts), work)
        self._blocked_by = None if work or self.running else self.cache.transfers_ended
        batch = ScheduledBatch.of(work, self._admitted, self.cache.copies, self._last)
        self._last = None if batch.admitted or batch.state_copies else batch
        return batch

    def _grow(self, seq: Sequence, num_new: int, room: int) -> int:
        """Give `seq` memory for its next tokens; return for how many of `num_new`, 0 if it was preempted.

        room   tokens behind them for which it gets memory too, if that is free
        """
        start = seq.num_computed_tokens
        if self.cache.grow(seq, min(start + num_new + room, seq.max_num_tokens)):
            return num_new
        while not self.cache.grow(seq, start + num_new):
            if seq.draft_token_ids:  # no sequence loses its memory to drafts
                seq.propose(())
                num_new = 1
            elif self._preempt_last() is seq:
                return 0
        return num_new

    def settle(self, *, idle: bool = False) -> None:
        """Let sequences wait for their turn again when their loads have ended; `idle` as in KVCacheManager.settle."""
        for seq in self.cache.settle(idle=idle and self._blocked_by is None):
            insort(self.waiting, seq, key=_by_order)

    def launched(self, batch: ScheduledBatch) -> None:
        """Enter the launch of `batch`; `commit` follows for all launched batches in their order."""
        self._admitted.clear()
        self.table.launched(batch.seqs, batch.rows, batch.num_new_tokens, batch.num_logits)
        self.cache.launched(batch.seqs)
        for seq in batch.seqs if batch.prefill_tokens else ():
            if seq.images is not None:
                seq.images.launched(seq.num_computed_tokens)

    def drafted(self, batch: ScheduledBatch, references: Iterable[tuple[int, ...]] | None) -> None:
        """Take the references to the drafts that a launched step makes, for each sequence of its batch; None: none."""
        for seq, coming in zip(batch.seqs, references, strict=True) if references else ():
            if not seq.finished:
                seq.coming_drafts = coming

    def follow(self, plan: StepPlan) -> None:
        """Enter the plan of a step, before its launch."""
        if self.adapters is not None:
            self.adapters.follow(plan)
        if self.images is not None:
            self.images.follow(plan)

    def observe(self, plan: StepPlan, gap_s: float) -> None:
        """Note a step of the group that ended `gap_s` seconds after the step before it."""
        if self.speculator is not None and not plan.prefill_tokens:
            self.speculator.observe(StepSize.of(plan), gap_s)
        if self.images is not None:
            self.images.observe(plan, gap_s)

    def commit(self, batch: ScheduledBatch, step: StepOutput) -> Committed:
        """Enter the output of a launched step. Sequences that have finished or were aborted get no output."""
        return self._commits.enter(batch, step, self.speculator)

    def check_integrity(self) -> None:
        """Raise AssertionError if memory of the cache has other owners than the running sequences."""
        self.cache.check_integrity(self.running)

    def _draft(self, budget: int) -> int:
        """Propose drafts, so that each running sequence still gets a token, and none needs the memory of another.

        Return for how many tokens behind its own each sequence is to have memory: a draft model reads and writes them.
        """
        speculator, num_groups = self.speculator, len(self.cache.groups) * len(self.running)
        num_free = self.cache.pool.num_free
        if speculator is None or num_free < 2 * num_groups:
            return 0
        decodes = [it for it in self.running if it.num_computed_tokens >= it.num_prefill_tokens]
        seqs = [seq for seq in decodes if seq.takes_drafts]
        free = budget - len(self.running)
        for seq, drafts in speculator.drafts(seqs, len(decodes), free) if free > 0 else ():
            seq.propose(drafts)
        ahead = speculator.num_ahead
        most = 1 + -(-(1 + 2 * ahead) // self.cache.block_size)  # blocks that one may need
        return ahead if num_free >= most * num_groups else 0

    def _admit(self, budget: int, work: list[ScheduledSequence]) -> None:
        index = 0  # sequences before it wait for blocks of another sequence, or for a slot
        while index < min(len(self.waiting), MAX_HELD_BACK) and budget:
            if len(self.running) == self._config.max_num_seqs:
                break
            seq = self.waiting[index]
            # A preempted sequence needs all its tokens to be known.
            prefix = None if seq.num_pending else self.cache.lookup(seq)
            if prefix is None:
                if self.cache.park(seq):
                    del self.waiting[index]
                else:
                    index += 1
                continue
            num_remaining = seq.num_tokens - prefix.num_tokens
            num_new = min(num_remaining, budget)
            if num_new < num_remaining and not self._config.chunked_prefill:
                break
            goes_on = bool(work or self.running) or self.cache.transfers_ended is not None
            if not self.cache.fits(seq, prefix, goes_on=goes_on):
                break
            is_loaded = self.cache.begin_load(seq, prefix)
            if is_loaded is None and goes_on:
                break
            if is_loaded or not self._holds_images(seq, prefix):
                del self.waiting[index]
                continue
            if not self._adapter_users.take(seq, self.adapters):
                index += 1
                continue
            del self.waiting[index]
            self._start(seq, prefix, num_new)
            if self._config.chunked_prefill:
                num_new = self.cache.chunk(seq, num_new)
            work.append(seq.part(PROMPT, num_new))
            budget -= num_new

    def _holds_images(self, seq: Sequence, prefix: Prefix | None) -> bool:
        """Return whether `seq` has the embeddings that it needs behind its prefix; else it waits for them."""
        if seq.images is None:
            return True
        assert self.images is not None, "a request with images was not refused"
        return self.images.holds(seq, 0 if prefix is None else prefix.num_tokens)

    def _start(self, seq: Sequence, prefix: Prefix, num_new: int) -> None:
        """Run `seq` from the end of its `prefix`; `num_new` tokens come first."""
        seq.num_computed_tokens = prefix.num_tokens
        self.table.add(seq)
        self.cache.allocate(seq, prefix, num_new)
        self._admitted.append(seq)
        insort(self.running, seq, key=_by_order)

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
        if self.speculator is not None:
            self.speculator.forget(seq)
        if seq.row >= 0:
            self.running.remove(seq)
            self._release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        elif self.images is not None:  # otherwise it waits for a load, which ends without it
            self.images.drop(seq)
        if seq.images is not None:
            seq.images.release()
        del self._by_id[seq.request.request_id]

    def _release(self, seq: Sequence) -> None:
        self._last = None
        if seq in self._admitted:
            self._admitted.remove(seq)
        self.cache.release(seq)
        self.table.remove(seq)
        if seq.images is not None:
            seq.images.release()
        self._adapter_users.leave(seq)
