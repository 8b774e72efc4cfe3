"""Counts rows of logits, and vectors, with a NaN or an infinity, and logs the requests that they belong to.

A request ends with the first such row that it would draw a token from. Rows of prompts with prompt_logprobs, and rows
of requests that have ended before the step is committed, end nothing.
"""

import logging
import math
from collections import Counter
from itertools import islice

import numpy as np

from workers.sampling.no_token import INVALID_LOGITS, cause_of
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput

logger = logging.getLogger(__name__)


class InvalidLogits:
    """The rows of one rank. `num_rows`: since the start."""

    def __init__(self) -> None:
        self.num_rows = 0

    def count(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Count the rows of one step."""
        drawn = min(output.token_ids, default=0) < 0
        if not drawn and output.prompt_logprobs is None and output.vectors is None:
            return
        rows = _prompt_rows(output) + _vectors(batch, output)
        if drawn:
            rows += _drawn_rows(batch, output)
        for request_id, count in rows.items():
            logger.warning(
                "request %s: rows of logits with a NaN or an infinity: %d", request_id, count
            )
        self.num_rows += rows.total()


def _drawn_rows(batch: ScheduledBatch, output: StepOutput) -> Counter[str]:
    tokens = iter(output.token_ids)
    return Counter(
        seq.request.request_id
        for seq, count in zip(batch.seqs, output.counts, strict=True)
        for token_id in islice(tokens, count)
        if token_id < 0 and cause_of(token_id, seq.request.params) == INVALID_LOGITS
    )


def _vectors(batch: ScheduledBatch, output: StepOutput) -> Counter[str]:
    vectors = output.vectors or [None] * len(batch.seqs)
    return Counter(
        seq.request.request_id
        for seq, vector in zip(batch.seqs, vectors, strict=True)
        if vector is not None and not np.isfinite(vector).all()
    )


def _prompt_rows(output: StepOutput) -> Counter[str]:
    """Return the rows of prompts: a softmax over a NaN or +inf is NaN for each token."""
    return Counter(
        request_id
        for request_id, entries in (output.prompt_logprobs or {}).items()
        for entry in entries
        if entry is not None and math.isnan(entry.logprob)
    )
