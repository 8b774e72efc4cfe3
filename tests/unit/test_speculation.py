"""The n-gram drafter, acceptance, step times and the choice of drafts, alone and in an engine."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.engine_harness import make_request
from workers.speculation.depth import (
    LEAST_SURVIVAL,
    Acceptance,
    choose_depths,
    expected_shares,
)
from workers.speculation.drafter import NewTokens
from workers.speculation.ngram import NGRAM, NGramDrafter
from workers.speculation.speculator import (
    Speculator,
    make_speculator,
)
from workers.speculation.step_times import DraftCosts, StepSize, StepTimes
from workers.speculation_config import SpeculationConfig
from workers.step.draft_budget import DraftBudget
from workers.step.sequence import Sequence
from workers.step.step_sync import PlanConfig, StepPlan, decide
from workers.step.vote import Vote


def size(rows: int, num_drafts: int) -> StepSize:
    return StepSize(rows, num_drafts > 0)


def limited(num_tokens: int, limit: int) -> StepPlan:
    """A step with drafts, behind which the ranks have this limit."""
    votes = SimpleNamespace(limit=lambda: limit)
    return StepPlan(True, (num_tokens,), draft_votes=votes, verifies=True)


def vote_alone(
    drafts: Speculator, num_decodes: int, budget: DraftBudget | None = None, verifies: bool = False
) -> StepPlan:
    """Vote for a step of a group of one rank, and enter its plan."""
    vote = Vote(
        epoch=0,
        step=0,
        num_tokens=num_decodes,
        has_work=1,
        draft_rows=num_decodes,
        verifies=verifies,
        **drafts.vote(num_decodes),
    )
    plan = decide(vote.row()[None], PlanConfig(False, drafts=budget or DraftBudget()))
    drafts.follow(plan)
    return plan


few_tokens = st.lists(st.integers(0, 2), max_size=14)


def test_a_step_without_rows_has_a_time():
    """A line through the origin gave none, and the costs of drafts were divided by it."""
    costs = DraftCosts()
    for rows in (1, 2, 3):
        costs.observe(size(rows, 0), 0.01 * rows)
    assert np.isfinite(costs.expected(0, 2)).all()
    unmoved = StepTimes()  # the clock did not move
    unmoved.observe(2, 0.0)
    assert unmoved.expected(2) > 0


def sequence(prompt: list[int], prediction: tuple[int, ...] = (), output: list[int] = ()):
    seq = Sequence.from_request(
        make_request("a", prompt, prediction_token_ids=prediction, max_tokens=100)
    )
    seq.token_ids = [*prompt, *output]
    return seq


def new_tokens(seq: Sequence, accepted: int = 0, verified: int = 0) -> NewTokens:
    """The new tokens of one sequence, the only one of its step."""
    return NewTokens([seq], [0], [accepted], [verified])


def places(given: list[int], context: list[int], output: list[int]) -> list[int | None]:
    """The place that is followed after each token of the output, by searching the whole text each time."""
    text, place, found, right = list(given), None, [], 0
    for count, token in enumerate(output, 1):
        hit = place is not None and text[place] == token
        text.append(token)
        if hit:
            place += 1
        else:
            last = [*context, *output[:count]][-NGRAM:]
            ends = [end for end in range(NGRAM, len(given)) if given[end - NGRAM : end] == last]
            for known in range(1, count):
                window = [*context, *output[:known]][-NGRAM:]
                if window == last and len(window) == NGRAM:
                    ends.append(len(given) + known)
            follows = place is not None and right >= NGRAM
            place = ends[-1] if ends and len(last) == NGRAM else place + 1 if follows else None
        right = right + 1 if hit else 0
        found.append(place)
    return found


@given(few_tokens.filter(bool), few_tokens, few_tokens, st.integers(1, 6))
def test_the_last_place_of_the_last_tokens_is_followed(prompt, prediction, output, most):
    seq = sequence(prompt, tuple(prediction))
    drafter = NGramDrafter()
    given = prompt + prediction
    right = 0
    expected = places(given, prompt, output)
    drafter.committed(new_tokens(seq))
    for count, place in enumerate(expected, 1):
        guessed = drafter.propose(seq, 1)
        seq.token_ids = prompt + output[:count]
        (guesses,) = drafter.committed(new_tokens(seq))
        assert sum(guesses) == len(guessed)
        right += guesses.right
        drafts = drafter.propose(seq, most)
        assert drafter.has_drafts(seq) == (place is not None) == bool(drafts)
        if place is None:
            continue
        text = given + output[:count]
        period = len(text) - place
        assert list(drafts) == [text[place + i % period] for i in range(most)]
    at_once = sequence(prompt, tuple(prediction), output)
    NGramDrafter().committed(new_tokens(at_once))
    fresh = NGramDrafter()
    fresh.committed(new_tokens(at_once))
    assert fresh.propose(at_once, most) == drafter.propose(seq, most)


def test_a_prediction_is_followed_from_the_first_token_of_the_output():
    prediction = tuple(range(50, 80))
    seq = sequence([1, 2, 3], prediction, [50])
    drafter = NGramDrafter()
    drafter.committed(new_tokens(seq))
    assert drafter.propose(seq, 4) == (51, 52, 53, 54)
    drafter.forget(seq)
    assert drafter.propose(seq, 4) == ()


def test_acceptance_follows_the_last_guesses():
    acceptance = Acceptance()
    assert acceptance.share == 0.5
    acceptance.count(40, 0)
    assert acceptance.share > 0.95
    acceptance.count(0, 40)
    assert acceptance.share < 0.05


def test_a_sequence_differs_from_all_as_far_as_chance_does_not_explain_it():
    few_wrong = expected_shares(np.array([0.6]), 0.7)
    assert few_wrong.tolist() == [0.7]
    assert expected_shares(np.array([0.1]), 0.7) == pytest.approx([0.12], abs=0.02)
    both = expected_shares(np.array([0.9, 0.1] * 4), 0.5)
    assert both == pytest.approx(np.array([0.87, 0.13] * 4), abs=0.02)
    assert len(expected_shares(np.array([]), 0.5)) == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0, 1))
def test_expected_shares_lie_between_the_shares_and_that_of_all(shares, of_all):
    share_S = np.array(shares)
    found = expected_shares(share_S, of_all)
    assert (found >= np.minimum(share_S, of_all) - 1e-9).all()
    assert (found <= np.maximum(share_S, of_all) + 1e-9).all()


def test_a_sequence_with_two_steps_since_the_last_vote_votes_its_drafts_once():
    drafts, seq = speculator(num_draft_tokens=3), sequence([1], output=[4] * 9)
    for _ in range(2):
        seq.token_ids.append(4)
        drafts.committed(new_tokens(seq))
    drafts.settle()
    assert drafts.vote(1)["drafts"] == 3
    assert drafts.vote(0).get("drafts", 0) == 0, "no sequence decodes"


def test_a_sequence_with_unlikely_drafts_does_not_wait_for_its_token_though_others_draft():
    """The limit is that of the group: drafts of another rank may pay."""
    drafts = speculator()
    good, bad = (sequence([1], output=[4] * 9) for _ in range(2))
    for _ in range(40):
        for seq in (good, bad):
            seq.token_ids.append(4)
            drafts.committed(new_tokens(seq))
        drafts.settle()
    drafts.follow(limited(2, 8))
    assert sum(len(tokens) for _, tokens in drafts.drafts([good, bad], 2, 8)) == 6
    drafts.follow(limited(2, 2))
    assert not list(drafts.drafts([good, bad], 2, 8)), "the decodes alone have as many rows"
    drafts._acceptance[bad].count(0, 400)
    for seq in (good, bad):
        drafts.committed(new_tokens(seq))
    drafts.settle()
    assert drafts._drafter.has_drafts(bad)
    assert good.speculates and not bad.speculates


def test_no_launch_waits_for_the_limit_of_the_next_step():
    drafts, seq = speculator(), sequence([1], output=[4] * 9)
    limit = Mock(return_value=0)
    drafts.follow(StepPlan(True, (1,), draft_votes=SimpleNamespace(limit=limit)))
    limit.assert_not_called()
    drafts.committed(new_tokens(seq))
    drafts.settle()
    assert not seq.speculates
    limit.assert_called_once()
    drafts.follow(limited(1, 5))
    drafts.follow(StepPlan(True, (1,)))  # no rank has drafts, and the last limit holds
    drafts.settle()
    drafts.committed(new_tokens(seq))
    drafts.settle()
    assert seq.speculates and drafts._limit == 5


@given(st.floats(0.1, 5), st.floats(0, 1), st.integers(1, 50))
def test_a_line_through_steps_of_many_sizes_is_found(fixed, per_row, start):
    times = StepTimes()
    for step in range(200):
        rows = start + step % 9
        times.observe(rows, fixed + per_row * rows)
    assert times.expected(start + 4) == pytest.approx(fixed + per_row * (start + 4), rel=0.05)
    assert times.seconds_per_row == pytest.approx(per_row, rel=0.2, abs=0.05 * fixed / start)


def test_one_slow_step_changes_little():
    times = StepTimes()
    for _ in range(20):
        times.observe(4, 1.0)
    times.observe(4, 1000.0)
    assert times.expected(4) < 1.2


def test_what_steps_with_drafts_take_beside_their_rows_is_their_excess():
    costs = DraftCosts()
    for _ in range(60):
        for rows in (2, 4, 6):
            costs.observe(size(rows, 0), 1.0 + 0.1 * rows)
    plain = costs.expected(4, 3)
    assert plain == pytest.approx(1 + 0.1 / 1.4 * np.arange(1, 4), rel=0.02)
    for _ in range(5):
        costs.observe(size(6, 2), 2 * 1.6)
    raised = costs.expected(4, 2)
    assert (raised > 1.2 * plain[:2]).all()
    for _ in range(3000):
        costs.relax()
    assert (costs.expected(4, 2) < 1.1 * raised / 1.2).all()


sequences = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=1, max_size=3)


@given(sequences, st.integers(0, 3), st.integers(0, 9), st.floats(0, 1))
def test_the_chosen_drafts_have_the_best_rate_of_all(seqs, others, budget, per_row):
    """Among all numbers of drafts of all sequences."""
    costs = 1.1 + per_row * np.arange(1, 1 + budget)
    share, available = map(np.array, zip(*seqs, strict=True))
    num_decodes = len(seqs) + others
    likely = [int((a ** np.arange(1, 5) >= LEAST_SURVIVAL).sum()) for a in share.tolist()]
    available = np.minimum(available, likely)

    def rate(depths) -> float:
        tokens = num_decodes + sum(
            share[i] ** (place + 1) for i, depth in enumerate(depths) for place in range(depth)
        )
        return tokens / (costs[sum(depths) - 1] if sum(depths) else 1.0)

    found = choose_depths(share, available, num_decodes, costs)
    assert (found <= available).all() and found.sum() <= budget
    best = max(rate(depths) for depths in np.ndindex(*(available + 1)) if sum(depths) <= budget)
    assert rate(found.tolist()) == pytest.approx(best, rel=1e-6)


def test_a_step_that_once_was_slow_is_tried_again():
    """While a draft is there and none is taken, its cost is taken for a little less."""
    drafts = speculator()
    seq = sequence([1], output=[4] * 40)
    drafts.committed(new_tokens(seq))
    drafts.settle()
    drafts.observe(size(1, 0), 1.0)
    for _ in range(5):
        drafts.observe(size(5, 4), 20.0)
    taken = 0
    for _ in range(2000):
        seq.token_ids.append(4)
        drafts.committed(new_tokens(seq))
        drafts.settle()
        vote_alone(drafts, 1)
        if found := list(drafts.drafts([seq], 1, 8)):
            taken += 1
            drafts.observe(size(1 + len(found[0][1]), len(found[0][1])), 1.5)
        else:
            drafts.observe(size(1, 0), 1.0)
    assert taken > 500


def speculator(**options) -> Speculator:
    made = make_speculator(SpeculationConfig(method="ngram", **options))
    assert made is not None
    return made


def test_drafts_end_when_guesses_are_wrong_and_begin_when_they_are_right_again():
    """Guesses are compared with tokens also where they are not drafted, so no row is spent to begin again."""
    drafts = speculator()
    for count in (0, 1, 2, 3, 4) * 20:
        drafts.observe(size(1 + count, count), 1.0 + 0.3 * (count > 0) + 0.1 * count)
    seq = sequence([0])
    drafts.committed(new_tokens(seq))
    drafts.settle()
    chance = np.random.default_rng(0)

    def run(tokens) -> list[bool]:
        spent = []
        for token in tokens:
            seq.token_ids.append(int(token))
            drafts.committed(new_tokens(seq))
            drafts.settle()
            vote_alone(drafts, 1)
            drafts.settle()
            found = list(drafts.drafts([seq], 1, 8))
            count = len(found[0][1]) if found else 0
            drafts.observe(size(1 + count, count), 1.0 + 0.3 * (count > 0) + 0.1 * count)
            spent.append(bool(count))
        return spent

    noise = run(chance.integers(0, 8, 400))
    assert sum(noise[100:]) < 60
    cycle = run([5, 6, 7, 8, 9, 10] * 20)
    assert all(cycle[-40:])
    assert sum(run(chance.integers(0, 8, 300))[100:]) < 60


def test_a_sequence_waits_for_its_token_only_while_drafts_pay():
    drafts = speculator()
    seq = sequence([1, 2, 3, 4], output=[9, 9, 9, 9, 9])
    for count, seconds in ((0, 1.0), (1, 1.9)) * 50:
        drafts.observe(size(1 + count, count), seconds)
    drafts.committed(new_tokens(seq))
    drafts.settle()
    assert not drafts._drafter.propose(seq, 0) and drafts._drafter.has_drafts(seq)
    assert vote_alone(drafts, 1).draft_limit == 0
    drafts.committed(new_tokens(seq))
    drafts.settle()
    assert not seq.speculates  # half of the guesses are expected to be right, a row costs 0.9 steps
    seq.token_ids += [9] * 60
    drafts.committed(new_tokens(seq))
    drafts.settle()
    assert vote_alone(drafts, 1).draft_limit == 5
    drafts.committed(new_tokens(seq))
    drafts.settle()
    assert seq.speculates


def test_without_adaptation_each_sequence_drafts_while_the_budget_lasts():
    drafts = speculator(adaptive=False, num_draft_tokens=3)
    seqs = [sequence([1], output=[4] * 9) for _ in range(3)]
    for seq in seqs:
        drafts.committed(new_tokens(seq))
        drafts.settle()
    found = list(drafts.drafts(seqs, 3, 5))
    assert [tokens for _, tokens in found] == [(4, 4, 4), (4, 4)]
    assert make_speculator(SpeculationConfig()) is None
