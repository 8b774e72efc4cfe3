"""The output of a launched step, entered in its sequences. Knows nothing of schedules.

A device may wait for the launch behind a commit, and no launch needs outputs. So they are made when they are sent.
"""

from collections.abc import Callable

import numpy as np

from workers.kv_cache.manager import KVCacheManager
from workers.sampling import no_token
from workers.speculation.drafter import NewTokens
from workers.speculation.speculator import Speculator
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import VERIFY, InputBatch, ScheduledSequence, Sequence
from workers.step.step_output import StepOutput
from workers.wire.request import RequestOutput


class Committed:
    """A step that has been committed.

    special   by index in the batch, the outputs of sequences that may end with the step; None: no output. All other
              sequences with tokens go on.
    """

    def __init__(self, batch: ScheduledBatch, step: StepOutput):
        self.batch, self.step = batch, step
        self.special: dict[int, RequestOutput | None] = {}

    def outputs(self) -> list[RequestOutput]:
        """Return the outputs in the order of the batch. Call it once: some facts are reported once."""
        step, special, end = self.step, self.special, 0
        outputs: list[RequestOutput | None] = []
        for index, (part, count) in enumerate(zip(self.batch.parts, step.counts, strict=True)):
            start, end = end, end + count
            if index in special:
                outputs.append(special[index])
            else:
                outputs.append(_output(part, step.token_ids[start:end]) if count else None)
        return step.attach(outputs)

    def served(self) -> list[Sequence]:
        """Return the sequences with outputs."""
        there = [count > 0 for count in self.step.counts]
        for index, output in self.special.items():
            there[index] = output is not None
        return [seq for seq, has_output in zip(self.batch.seqs, there, strict=True) if has_output]


class Commits:
    """Commits steps in the order of their launches.

    finish        ends a sequence
    num_invalid   requests that ended because of their logits
    """

    def __init__(
        self, cache: KVCacheManager, table: InputBatch, finish: Callable[[Sequence], None]
    ):
        self.num_invalid = 0
        self._cache, self._table, self._finish = cache, table, finish

    def enter(
        self, batch: ScheduledBatch, step: StepOutput, speculator: Speculator | None
    ) -> Committed:
        """Enter the output of a launched step. Sequences that have finished or were aborted get no output."""
        committed, token_ids, end = Committed(batch, step), step.token_ids, 0
        special, going = committed.special, list[int]()
        all_drawn = min(token_ids, default=0) >= 0
        for index, (part, count) in enumerate(zip(batch.parts, step.counts, strict=True)):
            seq, end = part.seq, end + count
            seq.num_pending -= part.num_logits
            if seq.finished:
                special[index] = None
                continue
            if part.kind is VERIFY:
                seq.verified(part.num_logits - count)
            drawn = token_ids[end - count : end]
            goes_on = count and all_drawn and seq.goes_on_behind(drawn)
            if goes_on:
                seq.token_ids += drawn
                going.append(index)
            if seq.num_computed_tokens >= seq.next_full:
                self._cache.commit(seq)
            if part.ends_vector:
                assert step.vectors is not None, "the step has a vector to end"
                special[index] = self._end_with_vector(seq, step.vectors[index])
            elif count and not goes_on:
                special[index] = self._append(part, drawn)
        self._table.committed(batch.seqs, step.counts, token_ids, batch.num_logits)
        if speculator is not None:
            going += [at for at in special if step.counts[at] and not batch.seqs[at].finished]
            speculator.committed(NewTokens.of(batch, step.counts, sorted(going)), step.drafts)
        self._cache.committed()
        return committed

    def _append(self, part: ScheduledSequence, drawn: list[int]) -> RequestOutput:
        """Append the tokens up to the first that ends the sequence of `part`."""
        seq, known = part.seq, len(part.seq.token_ids)
        drafts, request_id = _drafts(part, len(drawn)), seq.request.request_id
        finish_reason = None
        for token_id in drawn:
            if token_id < 0 or seq.grammar is not None:
                error = self._error_of(seq, token_id)
                if error is not None:
                    self._finish(seq)
                    drawn = seq.token_ids[known:]
                    return RequestOutput(request_id, drawn, "error", error, drafts=drafts)
            seq.token_ids.append(token_id)
            finish_reason = seq.finish_reason()
            if finish_reason is not None:
                self._finish(seq)
                break
        output = _output(part, seq.token_ids[known:])
        output.finish_reason, output.drafts = finish_reason, drafts
        return output

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
        self._cache.forget(seq)  # the K and V of its blocks may be NaN too
        self.num_invalid += 1


def _output(part: ScheduledSequence, token_ids: list[int]) -> RequestOutput:
    """Return the output of a sequence that has got these tokens and goes on."""
    seq = part.seq
    output = RequestOutput(seq.request.request_id, token_ids)
    output.drafts = _drafts(part, len(token_ids))
    if seq.num_cached_tokens:
        output.num_cached_tokens, seq.num_cached_tokens = seq.num_cached_tokens, 0
    return output


def _drafts(part: ScheduledSequence, num_drawn: int) -> tuple[int, int] | None:
    """Return `RequestOutput.drafts` of a part with `num_drawn` draws that count."""
    num_drafts = len(part.draft_token_ids)
    return (num_drawn - 1, num_drafts - num_drawn + 1) if num_drafts else None
