"""The rows that the ranks agree on for drafts: the best rate by the model, whatever the ranks' sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine import datagram_vote
from workers.runner.graph_sizes import decode_sizes
from workers.speculation.depth import choose_depths, likeliest_depths, survivals
from workers.speculation.step_times import DraftCosts, StepSeconds
from workers.step.draft_budget import (
    FACTOR_UNIT,
    GAIN_BITS,
    GAIN_UNIT,
    PARTS,
    SHARE_UNIT,
    DraftBudget,
    packed_gains,
    padded,
)
from workers.step.step_sync import PlanConfig, decide
from workers.step.vote import NUM_WORDS, Vote, columns_of

K = 3
PLACES_K = np.arange(1, K + 1)
DECODES, VERIFY = decode_sizes(32), decode_sizes(128)
TABLE = StepSeconds(
    decode=((1, 3e-3), (8, 4.6e-3), (32, 8.6e-3)),
    verify=((1, 3e-3), (4, 3.9e-3), (32, 8.8e-3), (128, 12.3e-3)),
    first=((1, 1e-4), (128, 3e-4)),
    one_draft=((1, 3e-4), (32, 4e-4)),
    drafts=((1, 1e-3), (32, 1.5e-3)),
    most=K,
)
GRAPHS = DraftBudget(VERIFY, DECODES, TABLE)

Acceptance = list[list[float]]
"""Of each sequence of each rank."""

acceptance = st.lists(st.lists(st.sampled_from([0.05, 0.2, 0.5, 0.7, 0.9]), max_size=9), max_size=4)
busy = acceptance.filter(lambda ranks: any(ranks))


def vote(of_rank: list[float], **fields: int) -> Vote:
    """The vote of a rank of which all sequences have K drafts."""
    _, survival_N = survivals(np.array(of_rank), np.full(len(of_rank), K))
    values = {
        "num_tokens": len(of_rank),
        "has_work": 1,
        "draft_rows": len(of_rank),
        "drafts": len(survival_N),
        "draft_gains": packed_gains(survival_N),
        "draft_factor": FACTOR_UNIT,
    }
    return Vote(epoch=0, step=0, **{**values, **fields})


def limit_of(ranks: Acceptance, budget: DraftBudget, **fields: int) -> int | None:
    rows = np.stack([vote(rank, **fields).row() for rank in ranks])
    plan = decide(rows, PlanConfig(False, drafts=budget))
    assert plan == decide(rows, PlanConfig(False, drafts=budget))
    other_order = decide(rows[::-1], PlanConfig(False, drafts=budget))
    assert other_order.draft_limit == plan.draft_limit
    return plan.draft_limit


def depths_within(limit: int | None, ranks: Acceptance) -> list[np.ndarray]:
    """The drafts that ranks take."""
    return [
        likeliest_depths(np.array(of), np.full(len(of), K), (limit or 0) - len(of)) for of in ranks
    ]


def rate(ranks: Acceptance, depths: list[np.ndarray], passes: int) -> float:
    """Expected tokens a second, by the times of the busiest rank in the graphs."""
    decodes = max(map(len, ranks))
    tokens = float(sum(map(len, ranks)))
    for of, chosen in zip(ranks, depths, strict=True):
        tokens += sum(
            (share ** PLACES_K[:depth]).sum() for share, depth in zip(of, chosen, strict=True)
        )
    if not any(chosen.sum() for chosen in depths):
        return tokens / float(TABLE.of(padded(DECODES, decodes), False))
    rows = max(len(of) + int(chosen.sum()) for of, chosen in zip(ranks, depths, strict=True))
    seconds = float(TABLE.of(padded(VERIFY, rows), True, decodes if passes else 0, passes))
    return tokens / max(seconds, float(TABLE.of(padded(DECODES, decodes), False)))


@given(busy, st.sampled_from([0, K]))
def test_the_limit_is_never_worse_than_no_drafts_nor_than_the_choice_of_each_rank(ranks, passes):
    """By the model. Survivals are rounded down, by less than 1 / GAIN_UNIT, and averaged within a part."""
    limit = limit_of(ranks, GRAPHS, draft_passes=passes)
    found = rate(ranks, depths_within(limit, ranks), passes)
    alone = [np.zeros(len(of), dtype=int) for of in ranks]
    assert found >= rate(ranks, alone, passes)
    costs = DraftCosts(TABLE)
    by_rank = [
        choose_depths(
            np.array(of),
            np.full(len(of), K),
            len(of),
            costs.expected(len(of), K * len(of), passes),
        )
        if of
        else np.zeros(0, dtype=int)
        for of in ranks
    ]
    assert found >= 0.97 * rate(ranks, by_rank, passes)
    every_size = [rate(ranks, depths_within(size, ranks), passes) for size in VERIFY]
    assert found >= 0.97 * max(every_size)


@given(busy)
def test_a_limit_is_a_graph_that_some_rank_needs(ranks):
    """Rows just above a graph would be padded to the next one."""
    limit = limit_of(ranks, GRAPHS)
    if not limit:
        return
    assert limit in VERIFY
    assert limit >= max(map(len, ranks))
    smaller = VERIFY[VERIFY.index(limit) - 1] if limit > VERIFY[0] else 0
    assert any(smaller < len(of) * (1 + K) for of in ranks)


@given(busy, st.integers(1, 4))
def test_cheaper_and_better_drafts_get_no_fewer_rows(ranks, dear):
    """A factor of all steps with drafts, twice the survival of all drafts, the share of a row."""
    factors = [limit_of(ranks, GRAPHS, draft_factor=n * FACTOR_UNIT // 4) for n in (4, 4 + dear)]
    shares = [
        limit_of(ranks, DraftBudget(), draft_row_share=n * SHARE_UNIT // 16)
        for n in (dear, 2 * dear)
    ]
    for first, second in (factors, shares):
        assert (first is None) == (second is None) and (first or 0) >= (second or 0)
    votes = [vote(of) for of in ranks]
    halves = []
    for of in votes:
        parts = [of.draft_gains >> GAIN_BITS * part & GAIN_UNIT for part in range(PARTS)]
        halves.append(sum((part // 2) << GAIN_BITS * n for n, part in enumerate(parts)))
    limits = []
    for times in (1, 2):
        rows = [
            Vote(**{**vars(of), "draft_gains": times * half}).row()
            for of, half in zip(votes, halves, strict=True)
        ]
        limits.append(decide(np.stack(rows), PlanConfig(False, drafts=GRAPHS)).draft_limit or 0)
    assert limits[1] >= limits[0]


def test_a_rank_with_few_sequences_fills_the_rows_of_the_busiest():
    """They are free: the busiest rank, with drafts that do not pay, has as many rows anyway."""
    ranks = [[0.05] * 16, [0.5] * 2, []]
    limit = limit_of(ranks, GRAPHS)
    assert limit == 16
    assert [int(of.sum()) for of in depths_within(limit, ranks)] == [0, 6, 0]


def test_drafts_that_pay_on_one_rank_alone_may_not_pay_in_the_group():
    assert limit_of([[0.9] * 2], GRAPHS) == 8
    assert limit_of([[0.9], [0.05] * 8, [0.05] * 8, [0.05] * 8], GRAPHS, draft_passes=K) == 0


def test_ranks_without_drafts_have_no_limit():
    assert limit_of([[], []], GRAPHS, num_tokens=4) is None
    assert limit_of([[0.05]], GRAPHS) is None, "less likely than any that is verified"
    assert limit_of([[0.9] * 40], DraftBudget((32,), (32,), TABLE)) == 0, (
        "more decodes than any graph"
    )


@given(st.lists(st.floats(0, 1), max_size=100))
def test_packed_gains_are_lower_bounds(survival):
    survival_C = -np.sort(-np.array(survival))
    packed = packed_gains(survival_C)
    assert 0 <= packed < 1 << GAIN_BITS * PARTS
    width = max(1, -(-len(survival_C) // PARTS))
    gains = [packed >> GAIN_BITS * part & GAIN_UNIT for part in range(PARTS)]
    found = np.repeat(gains, width)[: len(survival_C)] / GAIN_UNIT
    assert (found.cumsum() <= survival_C.cumsum() + 1e-9).all()
    assert found.sum() >= survival_C.sum() - len(survival_C) / GAIN_UNIT - 1e-9
    if len(survival_C) <= PARTS:
        assert found == pytest.approx(survival_C, abs=1 / GAIN_UNIT)


@given(st.lists(st.fixed_dictionaries({"draft_rows": st.integers(0, 2**20 - 1),
                                       "draft_gains": st.integers(0, 2**56 - 1),
                                       "draft_row_share": st.integers(0, SHARE_UNIT),
                                       "wants_stop": st.booleans(), "has_work": st.integers(0, 1),
                                       "adapter_slots": st.integers(0, 2**62),
                                       "draft_steps": st.integers(0, 16)}), min_size=1, max_size=4))  # fmt: skip
def test_a_row_carries_all_fields(ranks):
    rows = np.stack([Vote(epoch=3, step=2**40, **fields).row() for fields in ranks])
    assert rows.shape == (len(ranks), NUM_WORDS) and rows.dtype == np.int64
    columns = columns_of(rows)
    for name in ranks[0]:
        assert columns[name] == [int(fields[name]) for fields in ranks]
    assert set(columns["epoch"]) == {3} and set(columns["step"]) == {2**40}
    assert not any(columns["num_tokens"] + columns["health"])


def test_a_field_that_needs_more_bits_is_refused():
    with pytest.raises(AssertionError, match="draft_steps 64 has more than 6 bits"):
        Vote(epoch=0, step=0, draft_steps=64).row()


def test_the_votes_of_eight_ranks_fit_in_a_packet_of_ethernet():
    """Fragments of datagrams are dropped by some firewalls."""
    headers = 40 + 8  # of IPv6 and UDP
    assert headers + datagram_vote._CONTENT + 8 * 8 * NUM_WORDS <= 1500
