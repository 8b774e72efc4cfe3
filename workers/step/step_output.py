"""The results of one forward for the sequences of its batch, from the runner to the scheduler. No tensors.

B sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from workers.step.drafts import Drafts
from workers.step.scheduled_batch import ScheduledBatch
from workers.wire.request import RequestOutput, TokenLogprobs

Drawn = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Seconds of one step by part: `prepare` on the host; the others on a GPU, if any.

    draft   of a draft model's passes behind the step before, because those of this step may not have ended
    """

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """New tokens of the sequences of a batch, in its order.

    token_ids        tokens of all sequences, one sequence after another; a number of `workers.sampling.no_token` where
                     no token could be drawn
    counts           how many of token_ids each sequence has, one number for each of the B sequences
    logprobs         one for each of token_ids, None for a request without logprobs; None if no request wants them
    prompt_logprobs  by request id, for prompts that this step completed; None if there are none
    vectors          float32 [n] for each of the B sequences, None where no vector is complete; None if all are None
    times            returns the times of the step; a launch waits for no such question to the device
    drafts           drafts that follow the new tokens; None: no draft model
    expert_counts    rows that came to each slot of the rank in each layer so far, int64 [L, s]; None in steps that
                     do not read them
    """

    token_ids: list[int]
    counts: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] | None = None
    vectors: list[np.ndarray | None] | None = None
    times: Callable[[], RunTimes] = RunTimes
    drafts: Drafts | None = None
    expert_counts: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        batch: ScheduledBatch,
        drawn: Drawn,
        logprobs: list[TokenLogprobs | None] | None = None,
        *,
        prompt_logprobs: dict[str, list[TokenLogprobs | None]] | None = None,
        vectors: list[np.ndarray | None] | None = None,
        times: Callable[[], RunTimes] = RunTimes,
        drafts: Drafts | None = None,
        expert_counts: np.ndarray | None = None,
        counts_B: np.ndarray | None = None,
    ) -> "StepOutput":
        """Return the output of `batch`: of the tokens drawn, and their logprobs, one for each row with logits.

        counts_B   as of `counts_of`
        """
        drawn_L = np.array(drawn, dtype=np.int64)
        counts_B = counts_of(batch, drawn_L, counts_B)
        if batch.draft_token_ids is not None:
            kept_L = batch.logits_places < counts_B[batch.logits_seqs]
            drawn_L = drawn_L[kept_L]
            logprobs = None if logprobs is None else list(compress(logprobs, kept_L.tolist()))
        return cls(
            token_ids=drawn_L.tolist(),
            counts=counts_B.tolist(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vectors=vectors,
            times=times,
            drafts=drafts,
            expert_counts=expert_counts,
        )

    def attach(self, outputs: list[RequestOutput | None]) -> list[RequestOutput]:
        """Return `outputs`, one for each sequence of the batch, with the log-probabilities of each request.

        An output has the first of the sequence's tokens, or all. None in `outputs` is left out.
        """
        if self.logprobs is None and self.prompt_logprobs is None:
            return [output for output in outputs if output is not None]
        attached, start = [], 0
        for output, count in zip(outputs, self.counts, strict=True):
            if output is not None:
                attached.append(self._with_logprobs(output, start))
            start += count
        return attached

    def _with_logprobs(self, output: RequestOutput, start: int) -> RequestOutput:
        """Return an output that has the tokens from index `start` on."""
        if not output.token_ids:
            return output
        found = (self.logprobs or [])[start : start + len(output.token_ids)]
        return replace(
            output,
            logprobs=[one for one in found if one is not None] or None,
            prompt_logprobs=(self.prompt_logprobs or {}).get(output.request_id),
        )


def counts_of(
    batch: ScheduledBatch, drawn_L: np.ndarray, counts_B: np.ndarray | None = None
) -> np.ndarray:
    """Return how many draws of each sequence count, int64 [B]: `counts_B` of a batch with drafts.

    counts_B   None: those up to the first that differs from the draft that it verifies
    """
    if batch.draft_token_ids is None:
        return batch.num_logits
    return count_verified(batch, drawn_L) if counts_B is None else counts_B


def count_verified(batch: ScheduledBatch, drawn_L: np.ndarray) -> np.ndarray:
    """Return how many draws of each sequence count, int64 [B]; the batch has drafts."""
    return count_draws(batch, drawn_L != batch.draft_token_ids)


def count_draws(batch: ScheduledBatch, last_L: np.ndarray) -> np.ndarray:
    """Return how many draws of each sequence count, int64 [B]: those up to the first of last_L, bool [L].

    At least the last draw of each sequence is one of last_L.
    """
    firsts_L = np.arange(len(batch.logits_seqs)) - batch.logits_places
    ends = np.flatnonzero(last_L)
    counts = np.zeros(len(batch.num_logits), dtype=np.int64)
    counts[batch.logits_seqs] = ends[ends.searchsorted(firsts_L)] - firsts_L + 1
    return counts
