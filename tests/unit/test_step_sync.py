"""`decide` is the contract between ranks: examples of each rule, then properties over random votes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.step.step_sync import (
    GraphMode,
    LockstepError,
    PlanConfig,
    UnhealthyRankError,
    compare_settings,
    decide,
    gather_reasons,
)
from workers.step.vote import Vote

RAGGED = PlanConfig(equal_tokens=False)
EQUAL = PlanConfig(equal_tokens=True)


def rows(*votes: Vote) -> np.ndarray:
    return np.stack([vote.row() for vote in votes])


def vote(num_tokens: int = 0, **fields) -> Vote:
    values = {"epoch": 1, "step": 7, "has_work": int(num_tokens > 0)}
    return Vote(num_tokens=num_tokens, **{**values, **fields})


def test_all_idle_sleeps():
    plan = decide(rows(vote(), vote()), EQUAL)
    assert not plan.run and not plan.stop


def test_idle_rank_runs_along_with_one_row_when_ragged():
    plan = decide(rows(vote(5), vote()), RAGGED)
    assert plan.run and plan.padded_tokens == 0
    assert [plan.tokens_to_run(rank) for rank in (0, 1)] == [5, 1]
    assert plan.num_tokens_across_dp == (5, 0)


def test_equal_tokens_pads_everyone_to_the_largest():
    plan = decide(rows(vote(5), vote(), vote(17)), EQUAL)
    assert [plan.tokens_to_run(rank) for rank in range(3)] == [17, 17, 17]


def test_graph_needs_everybody_and_pads_to_the_largest_graph():
    idle = vote(decode_rows=1, mixed_rows=16)
    decodes = vote(5, decode_rows=8, mixed_rows=16)
    prompts = vote(30, mixed_rows=32)

    def found(*group: Vote) -> tuple[GraphMode, int]:
        plan = decide(rows(*group), RAGGED)
        return plan.graph_mode, plan.padded_tokens

    assert found(decodes, idle) == (GraphMode.DECODE, 8)
    assert found(decodes, prompts, idle) == (GraphMode.MIXED, 32)
    assert found(idle, prompts) == (GraphMode.MIXED, 32)
    assert found(decodes, vote(3)) == (GraphMode.NONE, 0)


def test_ubatches_need_every_vote_and_tokens_in_every_last_ubatch():
    want = {"wants_ubatch": 1}
    assert decide(rows(vote(8, **want), vote(6, **want)), RAGGED).ubatch
    assert not decide(rows(vote(8, **want), vote(6)), RAGGED).ubatch
    assert not decide(rows(vote(8, **want), vote(4, **want)), RAGGED).ubatch
    assert decide(rows(vote(8, **want), vote(6, **want)), RAGGED).padded_tokens == 8
    assert not decide(rows(vote(1, **want), vote(1, **want)), RAGGED).ubatch
    three = PlanConfig(equal_tokens=False, num_ubatches=3)
    assert not decide(rows(vote(2, **want)), three).ubatch
    assert decide(rows(vote(3, **want)), three).ubatch


def test_the_last_ubatch_is_judged_on_padded_rows():
    """A graph of 16 rows is cut at row 8, whatever the 9 tokens of the largest rank."""

    def cuts(*tokens: int) -> bool:
        votes = (vote(n, decode_rows=16, mixed_rows=16, wants_ubatch=1) for n in tokens)
        plan = decide(rows(*votes), RAGGED)
        assert plan.padded_tokens == 16
        return plan.ubatch

    assert cuts(9, 9)
    assert not cuts(9, 8)


def test_ranks_without_tokens_run_along_in_ubatches():
    want = {"wants_ubatch": 1}
    plan = decide(rows(vote(8, **want), vote(0, **want)), RAGGED)
    assert plan.ubatch and plan.padded_tokens == 8


def test_one_rank_that_decodes_next_caps_the_prompts_of_all():
    decodes = vote(3, prefill_cap=256)
    prompts = vote(900, prefill_tokens=900)
    plan = decide(rows(prompts, decodes, vote(4, prefill_cap=300)), RAGGED)
    assert (plan.prefill_cap, plan.prefill_tokens) == (256, 900)
    assert decide(rows(prompts, vote()), RAGGED).prefill_cap == 0


def test_a_plan_has_decodes_if_a_rank_has_tokens_behind_prompts():
    prompts = vote(900, prefill_tokens=900)
    assert not decide(rows(prompts, prompts, vote()), RAGGED).decodes
    assert decide(rows(prompts, vote(3)), RAGGED).decodes
    assert decide(rows(vote(901, prefill_tokens=900), vote()), RAGGED).decodes


def test_stop_beats_work():
    plan = decide(rows(vote(5), vote(wants_stop=1)), EQUAL)
    assert plan.stop and not plan.run


@pytest.mark.parametrize("field", ["epoch", "step"])
def test_ranks_out_of_step_are_named(field):
    with pytest.raises(LockstepError, match=rf"{field}: \[3, 4\]"):
        decide(rows(vote(1, **{field: 3}), vote(1, **{field: 4})), EQUAL)


def test_the_first_unhealthy_rank_is_named():
    with pytest.raises(UnhealthyRankError, match="rank 1 reports a failure") as found:
        decide(rows(vote(1), vote(1, health=1), vote(step=9, health=1)), EQUAL)
    assert found.value.rank == 1


@pytest.mark.parametrize("reason", ["", "ValueError: 3 is odd", "\u00e9\udc80" * 400])
def test_reasons_reach_every_rank(reason):
    """Whole, or cut where a row ends; text that is no UTF-8 does no harm."""

    class Twice:
        def all_gather(self, row):
            return np.stack([row, np.zeros_like(row)])

    own, other = gather_reasons(Twice(), reason)
    assert other == ""
    assert own == reason if len(reason) < 100 else own[:4] == "\u00e9?\u00e9?" and len(own) > 300


def test_compare_settings_names_every_difference():
    same = {"kernels.all2all": "shm", "cache.block_size": 16}
    compare_settings([same, dict(same)])
    with pytest.raises(ValueError, match=r"cache.block_size: rank 0 has 16, rank 2 has 32"):
        compare_settings([same, same, {**same, "cache.block_size": 32}])
    with pytest.raises(ValueError, match=r"extra: rank 0 has None, rank 1 has 1"):
        compare_settings([same, {**same, "extra": 1}])


votes = st.builds(
    lambda tokens, decode, mixed, **flags: vote(
        tokens,
        decode_rows=decode and tokens + decode,
        mixed_rows=mixed and tokens + mixed,
        **flags,
    ),
    st.integers(0, 50),
    st.integers(0, 8),
    st.integers(0, 8),
    wants_ubatch=st.integers(0, 1),
    prefill_tokens=st.integers(0, 50),
    prefill_cap=st.sampled_from([0, 0, 5, 128, 8192]),
    wants_stop=st.sampled_from([0, 0, 0, 1]),
)


@given(st.lists(votes, min_size=1, max_size=8), st.booleans())
def test_plans_are_safe(group, equal):
    config = PlanConfig(equal_tokens=equal)
    plan = decide(rows(*group), config)
    tokens = [v.num_tokens for v in group]
    assert plan == decide(rows(*group), config)
    assert plan.num_tokens_across_dp == tuple(tokens)
    assert plan.run == (any(tokens) and not any(v.wants_stop for v in group))
    if not plan.run:
        return
    caps = [v.prefill_cap for v in group if v.prefill_cap]
    assert plan.prefill_cap == (min(caps) if caps else 0)
    assert plan.prefill_tokens == max(v.prefill_tokens for v in group)
    run = [plan.tokens_to_run(rank) for rank in range(len(group))]
    assert all(r >= max(1, t) for r, t in zip(run, tokens, strict=True))
    if equal or plan.ubatch or plan.graph_mode:
        assert len(set(run)) == 1
    if plan.ubatch:
        assert all(v.wants_ubatch for v in group)
        # the second ubatch of every rank with tokens has a real one
        assert min(filter(None, tokens)) > run[0] // 2
    graph_rows = {GraphMode.DECODE: "decode_rows", GraphMode.MIXED: "mixed_rows"}
    if plan.graph_mode:
        votes_of = [getattr(v, graph_rows[plan.graph_mode]) for v in group]
        assert all(votes_of) and plan.padded_tokens == max(votes_of)


def test_all_ranks_read_the_load_of_experts_in_equal_pairs_of_steps():
    read = [
        decide(rows(vote(3, step=step), vote(step=step)), RAGGED).load_step for step in range(100)
    ]
    assert [step for step in read if step is not None] == [
        *(0, 1, 16, 17, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97)
    ]


def test_layers_of_experts_are_committed_when_all_ranks_have_staged_them():
    def commit(*moves: tuple[int, int], tokens: int = 3) -> int:
        votes = [vote(tokens, move=move, move_staged=staged) for move, staged in moves]
        return decide(rows(*votes), RAGGED).move_commit

    assert commit((4, 1), (4, 1)) == 1 and commit((4, 9), (4, 7)) == 7
    assert commit((4, 1), (4, 1), tokens=0) == 1, "also while all ranks are idle"
    for moves in [((4, 1), (4, 0)), ((4, 1), (0, 0)), ((4, 1), (5, 1)), ((0, 0), (0, 0))]:
        assert commit(*moves) == 0, moves


def test_one_rank_cancels_a_move_for_all_and_the_plan_names_the_late_ranks():
    staged, late = {"move": 4, "move_staged": 2}, {"move": 4, "move_staged": 1}
    votes = vote(3, **staged, move_cancel=4), vote(**staged), vote(**late), vote(**late)
    plan = decide(rows(*votes), RAGGED)
    assert (plan.move_cancelled, plan.move_late, plan.move_commit) == (4, (2, 3), 0)
    plan = decide(rows(*votes, vote()), RAGGED)
    assert plan.move_late == (4,), "one that has not begun the move"
    plan = decide(rows(vote(3, **staged, move_cancel=4), vote(3, **staged)), RAGGED)
    assert (plan.move_cancelled, plan.move_commit) == (4, 0), "a cancel comes before a commit"
