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

import numpy as np

from workers.config import SchedulerConfig
from workers.kv_cache.group import Prefix
from workers.kv_cache.manager import KVCacheManager
from workers.sampling import no_token
from workers.scheduler.adapter_users import AdapterUsers
from workers.scheduler.image_queue import ImageQueue
from workers.scheduler.refusals import refusal_of
from workers.speculation.speculator import Speculator
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
from workers.wire.request import EngineRequest, RequestOutput

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
        self.num_invalid = 0  # requests that ended because of their logits
        self.speculator: Speculator | None = None
        self.adapters: AdapterSlots | None = None
        self.images: ImageQueue | None = None
        self._adapter_users = AdapterUsers()

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits for its turn, not for images, a load, or memory that transfers hold."""
        blocked = self._blocked_by is not None and self._blocked_by == self.cache.transfers_ended
        return not blocked and bool(self.running or self.waiting)

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

        A sequence of which only the next draw needs them does not, unless a draft model drafts behind the draws.
        """
        late = self.speculator is None or not self.speculator.uses_model
        return any(
            seq.num_pending
            and (seq.speculates or seq.draft_token_ids or (seq.needs_last_token and not late))
            for seq in self.running
        )

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
        if self.speculator is not None:
            self._draft(self.speculator, budget)
        prompts = prefill_cap if prefill_cap and self._config.chunked_prefill else budget
        work: list[ScheduledSequence] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            seq = self.running[index]
            kind = seq.kind
            if seq.ends_with_pending or (kind is PROMPT and not prompts):
                index += 1
                continue
            num_new = 1 if kind is DECODE else min(seq.num_remaining, budget)
            if kind is PROMPT:  # the decodes behind it run in this step too
                others = (it for it in self.running[index:] if it.kind is not PROMPT)
                behind = sum(other.num_remaining for other in others)
                prompts = min(prompts, max(1, budget - behind))
                num_new = min(num_new, prompts)
                if self._config.chunked_prefill:
                    num_new = self.cache.chunk(seq, num_new)
            while not self.cache.grow(seq, seq.num_computed_tokens + num_new):
                if num_new > 1 and kind is VERIFY:  # no sequence loses its memory to drafts
                    self.table.propose(seq, ())
                    kind, num_new = DECODE, 1
                    continue
                preempted = True
                if self._preempt_last() is seq:
                    break
            else:
                work.append(seq.part(kind, num_new))
                budget -= num_new
                prompts -= num_new if kind is PROMPT else 0
                index += 1
        # Admitting right after a preemption would only undo it.
        if not preempted:
            self._admit(min(budget, prompts), work)
        self._blocked_by = None if work or self.running else self.cache.transfers_ended
        return ScheduledBatch.of(work, self._admitted, self.cache.copies)

    def settle(self, *, idle: bool = False) -> None:
        """Let sequences wait for their turn again when their loads have ended; `idle` as in KVCacheManager.settle."""
        for seq in self.cache.settle(idle=idle and self._blocked_by is None):
            insort(self.waiting, seq, key=_by_order)

    def launched(self, batch: ScheduledBatch) -> None:
        """Enter the launch of `batch`; `commit` follows for all launched batches in their order."""
        self._admitted.clear()
        self.table.launched(batch.seqs, batch.num_new_tokens, batch.num_logits)
        self.cache.launched(batch.seqs)
        for seq in batch.seqs if batch.prefill_tokens else ():
            if seq.images is not None:
                seq.images.launched(seq.num_computed_tokens)

    def follow(self, plan: StepPlan) -> None:
        """Enter the plan of a step, before its launch."""
        if self.adapters is not None:
            self.adapters.follow(plan)
        if self.images is not None:
            self.images.follow(plan)

    def commit(self, batch: ScheduledBatch, step: StepOutput) -> list[RequestOutput]:
        """Enter the output of a launched step. Sequences that have finished or were aborted get no output."""
        outputs: list[RequestOutput | None] = []
        token_ids, end = step.token_ids, 0
        drafts_of, all_drawn = (step.drafts or {}).get, min(token_ids, default=0) >= 0
        for index, (part, count) in enumerate(zip(batch.parts, step.counts, strict=True)):
            seq, start, end = part.seq, end, end + count
            seq.num_pending -= part.num_logits
            if seq.finished:
                outputs.append(None)
                continue
            if part.kind is VERIFY:
                seq.verified(part.num_logits - count)
            if seq.num_computed_tokens >= seq.next_full:
                self.cache.commit(seq)
            if part.ends_vector:
                assert step.vectors is not None, "the step has a vector to end"
                outputs.append(self._end_with_vector(seq, step.vectors[index]))
                continue
            goes_on = all_drawn and seq.goes_on_behind(token_ids[start:end])
            outputs.append(self._append(part, token_ids[start:end], goes_on) if count else None)
            if self.speculator is not None and count and not seq.finished:
                verified = count - 1, len(part.draft_token_ids)
                self.speculator.committed(seq, drafts_of(index), verified)
        self.table.committed(batch.seqs, token_ids, step.counts)
        self.cache.committed()
        return step.attach(outputs)

    def check_integrity(self) -> None:
        """Raise AssertionError if memory of the cache has other owners than the running sequences."""
        self.cache.check_integrity(self.running)

    def _draft(self, speculator: Speculator, budget: int) -> None:
        """Propose drafts, so that each running sequence still gets a token, and none needs the memory of another."""
        if self.cache.pool.num_free < 2 * len(self.cache.groups) * len(self.running):
            return
        decodes = [seq for seq in self.running if seq.kind is not PROMPT]
        seqs = [seq for seq in decodes if seq.takes_drafts]
        free = budget - len(self.running)
        for seq, drafts in speculator.drafts(seqs, len(decodes), free) if free > 0 else ():
            self.table.propose(seq, drafts)

    def _append(self, part: ScheduledSequence, drawn: list[int], goes_on: bool) -> RequestOutput:
        """Append the tokens up to the first that ends the sequence of `part`; goes_on: none of them does."""
        seq, num_drafts = part.seq, len(part.draft_token_ids)
        drafts = (len(drawn) - 1, num_drafts - len(drawn) + 1) if num_drafts else None
        request_id, known = seq.request.request_id, len(seq.token_ids)
        finish_reason = None
        if goes_on:
            seq.token_ids += drawn
        for token_id in () if goes_on else drawn:
            if token_id < 0 or seq.grammar is not None:
                error = self._error_of(seq, token_id)
                if error is not None:
                    self._finish(seq)
                    drawn = seq.token_ids[known:]
                    return RequestOutput(request_id, drawn, "error", error, drafts=drafts)
            self.table.append_token(seq, token_id)
            finish_reason = seq.finish_reason()
            if finish_reason is not None:
                self._finish(seq)
                drawn = seq.token_ids[known:]
                break
        num_cached, seq.num_cached_tokens = seq.num_cached_tokens, 0  # reported once
        return RequestOutput(
            request_id, drawn, finish_reason, num_cached_tokens=num_cached, drafts=drafts
        )

    def _end_with_vector(self, seq: Sequence, vector: np.ndarray | None) -> RequestOutput:
        """Finish `seq`, which answers with a vector."""
        assert vector is not None, f"{seq.request.request_id} has no vector"
        request_id = seq.request.request_id
        self._finish(seq)
        if not np.isfinite(vector).all():
            self._forget_invalid(seq)
            error = f"{no_token.LOGITS_FAILED}: hidden states are NaN or infinite"
            return RequestOutput(request_id, [], "error", error)
        num_cached = seq.num_cached_tokens
        return RequestOutput(request_id, [], "stop", num_cached_tokens=num_cached, vector=vector)

    def _error_of(self, seq: Sequence, token_id: int) -> str | None:
        """Advance the grammar of `seq` by its next token; return why the sequence cannot go on, or None."""
        if token_id >= 0:
            return None if seq.grammar is None else seq.grammar.advance(token_id)
        cause = no_token.cause_of(token_id, seq.request.params)
        if cause == no_token.INVALID_LOGITS:
            self._forget_invalid(seq)
        return no_token.error_of(cause, seq.num_output_tokens)

    def _forget_invalid(self, seq: Sequence) -> None:
        self.cache.forget(seq)  # the K and V of its blocks may be NaN too
        self.num_invalid += 1

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
            if not self.cache.fits(seq, prefix):
                break
            if self.cache.begin_load(seq, prefix) or not self._holds_images(seq, prefix):
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
        if seq in self._admitted:
            self._admitted.remove(seq)
        self.cache.release(seq)
        self.table.remove(seq)
        if seq.images is not None:
            seq.images.release()
        self._adapter_users.leave(seq)
