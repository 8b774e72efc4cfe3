"""Drafts that only the device has, for tests that compare them, drafts that are right now and then, and no drafts."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.distributed.engine_harness import RankResult, run_rank
from workers.runner.draft_passes import Drafted, DraftPasses
from workers.step.forward_batch import resolve_pending
from workers.step.scheduled_batch import NO_DRAFT, ScheduledBatch


def with_tokens(scheduled: ScheduledBatch, last_tokens: torch.Tensor | None) -> ScheduledBatch:
    """Return the batch with the tokens of its drafts, which are found on the device before the next drafts are kept."""
    ids_L = scheduled.draft_token_ids
    if ids_L is None or last_tokens is None:
        return scheduled
    compared_L = torch.from_numpy(scheduled.compared_drafts)
    found_L = resolve_pending(compared_L, last_tokens.cpu()).numpy()
    return scheduled.with_drafts(np.where(ids_L == NO_DRAFT, NO_DRAFT, found_L))


def running_along(run: Callable[..., Drafted]) -> Callable[..., Drafted]:
    """Return a `DraftPasses.run` that runs along before, as on a rank without sequences, and then as `run`."""

    def run_twice(
        passes: DraftPasses, scheduled: ScheduledBatch, *rest: Any, **counts: Any
    ) -> Drafted:
        batch, plan, target = rest[:3]
        along = run(passes, scheduled, batch, plan, target, None)
        assert not len(along.rows.seqs) and not len(along.drafts_SK)
        return run(passes, scheduled, *rest, **counts)

    return run_twice


def right_drafts(answers: Mapping[str, Sequence[int]], depth: int) -> Callable[..., Drafted]:
    """Return a `DraftPasses.run` whose drafts are right: from none to `depth` of a step, by the place of the first.

    answers   the tokens of each request; requests without an answer, as those of the warm-up, keep their drafts
    """
    run = DraftPasses.run

    def run_right(passes: DraftPasses, scheduled: ScheduledBatch, *rest: Any) -> Drafted:
        found = run(passes, scheduled, *rest)
        _, _, _, token_L, counts_B = rest
        scheduled = with_tokens(scheduled, passes.last_tokens)
        last = found.rows.last(found.rows.counts(scheduled, token_L.numpy(), counts_B))
        for row, seq, position in zip(found.drafts_SK, last.seqs, last.positions, strict=True):
            request = scheduled.seqs[seq].request
            place = int(position) + 2 - len(request.prompt_token_ids)
            # by chance: the drafts after a step with a fixed pattern would all be right
            most = random.Random(place).randrange(depth + 1)
            right = answers.get(request.request_id, [])[place : place + most]
            count = min(len(right), int((row >= 0).sum()))
            row[:count] = torch.tensor(right[:count])
        return found

    return run_right


def run_rank_rightly(
    answers: Mapping[str, Sequence[int]], depth: int, *arguments: Any
) -> RankResult:
    """Run a rank as `run_rank` with `right_drafts`."""
    with patch.object(DraftPasses, "run", right_drafts(answers, depth)):
        return run_rank(*arguments)
