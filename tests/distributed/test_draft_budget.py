"""Ranks with different acceptance and times agree on the rows of each step with drafts."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
    run_rank,
)
from workers.speculation.speculator import Speculator

FEW = (4, 5, 6, 7)


@dataclass
class LimitResult(RankResult):
    """Of each step of the group: the limit of the plan, that which the rank has from now on, and whether drafts ran."""

    limits: list[tuple[int | None, int | None, bool]] = field(default_factory=list)


def run_with_limits(rank: int, *arguments: Any) -> LimitResult:
    """As run_rank. Steps take times by their rows, of each rank its own."""
    limits: list[tuple[int | None, int | None, bool]] = []
    follow, drafts = Speculator.follow, Speculator.drafts

    def recorded_follow(self: Speculator, plan: Any) -> None:
        follow(self, plan)
        limits.append((plan.draft_limit, self._limit, plan.verifies))

    def checked_drafts(self: Speculator, seqs: Any, num_decodes: int, budget: int) -> Iterator[Any]:
        found = list(drafts(self, seqs, num_decodes, budget))
        rows = num_decodes + sum(len(tokens) for _, tokens in found)
        limit = self._limit
        assert not found or limit is None or rows <= limit, f"{rows} rows, limit {limit}"
        return iter(found)

    def observe(self: Speculator, size: Any, seconds: float) -> None:
        self._costs.observe(size, 1 + 0.05 * rank + (0.02 + 0.01 * rank) * size.rows)

    changed = {"follow": recorded_follow, "drafts": checked_drafts, "observe": observe}
    with mock.patch.multiple(Speculator, **changed):
        result = run_rank(rank, *arguments)
    return LimitResult(**vars(result), limits=limits)


@pytest.mark.parametrize(("num_ranks", "asynchronous"), [(2, False), (4, True)])
def test_all_ranks_have_one_limit_in_every_step(rank_pool, tmp_path, num_ranks, asynchronous):
    """The answers of rank 0 are as predicted, those of rank 1 are not; other ranks idle for most of the time."""
    checkpoint = make_checkpoint(
        tmp_path, num_layers=2, hidden_size=64, num_experts=8, vocab_size=320
    )
    chance, events = random.Random(num_ranks), []
    for number in range(6 * num_ranks):
        rank = number % num_ranks
        steps = (0, 25, 50) if rank < 2 else (30,)
        params = {"max_tokens": 30, "allowed_token_ids": FEW, "temperature": 1.0, "seed": number}
        request = make_request(str(number), [chance.randrange(300) for _ in range(9)], **params)
        events.append(Event(chance.choice(steps), rank, request))
    events.sort(key=lambda event: event.step)

    def run(speculation: dict, placed: list[Event]) -> list[LimitResult]:
        config = rank_config(
            checkpoint,
            num_ranks,
            scheduler={"max_num_seqs": 4, "async_scheduling": asynchronous},
            speculation=speculation,
        )
        return run_engines(rank_pool, config, placed, function=run_with_limits)

    plain = {name: ids for result in run({}, events) for name, ids in result.tokens.items()}
    predicted = []
    for event in events:
        request = event.request
        answer = tuple(plain[request.request_id])
        if event.rank == 1:
            answer = tuple(chance.choice(FEW) for _ in answer)
        params = replace(request.params, prediction_token_ids=answer)
        predicted.append(replace(event, request=replace(request, params=params)))
    results = run({"method": "ngram", "num_draft_tokens": 3}, predicted)
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    assert tokens == plain
    first = results[0]
    assert all(result.limits == first.limits for result in results)
    held = [limit for _, limit, _ in first.limits]
    assert max(limit or 0 for limit in held) > 1 and len(set(held)) > 3
    assert any(verifies for *_, verifies in first.limits)
    shares = [result.num_accepted_tokens / result.num_draft_tokens for result in results[:2]]
    assert shares[0] > shares[1] > 0
