"""What drafts cost by the times that a start measures, and when a draft model drafts, reads and sleeps."""

import json
from dataclasses import asdict
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from tests.unit.test_speculation import new_tokens, sequence, vote_alone
from workers.speculation.depth import choose_passes
from workers.speculation.speculator import PATIENCE, PROBE_EVERY, VOTES_ALIKE, make_speculator
from workers.speculation.step_times import DraftCosts, StepSeconds, StepSize
from workers.speculation_config import SpeculationConfig
from workers.step.draft_budget import DraftBudget
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence

MEASURED = StepSeconds(
    decode=((1, 4.0), (8, 5.0), (32, 6.0)),
    verify=((1, 4.2), (4, 4.4), (32, 6.6), (128, 12.6)),
    first=((1, 0.1), (128, 0.4)),
    one_draft=((1, 0.3), (32, 0.4)),
    drafts=((1, 1.0), (32, 1.5)),
    most=3,
)


def budget(table: StepSeconds) -> DraftBudget:
    return DraftBudget(table=table)


def test_costs_are_right_before_the_first_step():
    costs = DraftCosts(MEASURED)
    assert costs.expected(1, 3)[2] == pytest.approx(4.4 / 4.0)
    alone, with_passes = 4.0, 4.4 + 0.1 + 0.3 * 3 / 127 + 1.0
    assert costs.expected(1, 3, 3)[2] == pytest.approx(with_passes / alone)
    found = costs.expected(32, 96, 3)
    assert found[-1] == pytest.approx((12.6 + 0.4 + 1.5) / 6.0)
    assert (np.diff(found) > 0).all()
    assert float(MEASURED.of(256, True)) == pytest.approx(2 * 12.6)
    assert costs.expected(1, 1, 2)[0] == pytest.approx(
        (4.2 + 0.2 / 3 + 0.1 + 0.3 / 127 + 0.65) / 4.0
    )
    latent = StepSeconds(decode=MEASURED.decode)
    assert float(latent.of(8, True)) == 5.0


def test_measured_times_follow_the_steps_in_service():
    """Longer contexts make all steps slower; what drafts take beside that is their excess."""
    costs = DraftCosts(MEASURED)
    before = costs.expected(8, 8, 3)
    for _ in range(100):
        for verifies, rows in ((False, 8), (True, 16)):
            drafts = 3 if verifies else 0
            step = StepSize(rows, verifies, 8, drafts)
            costs.observe(step, 1.5 * float(MEASURED.of(*step)))
    assert costs.expected(8, 8, 3) == pytest.approx(before, rel=0.01)
    for _ in range(100):
        costs.observe(StepSize(16, True, 8, 3), 1.8 * float(MEASURED.of(16, True, 8, 3)))
    assert costs.expected(8, 8, 3) == pytest.approx(1.2 * before, rel=0.01)


def test_the_slowest_rank_has_the_times_of_the_group():
    other = StepSeconds(decode=((1, 5.0), (8, 4.5), (32, 6.0)), verify=MEASURED.verify)
    one = StepSeconds(decode=MEASURED.decode, verify=MEASURED.verify)
    found = StepSeconds.slowest([one, other])
    assert found == StepSeconds(decode=((1, 5.0), (8, 5.0), (32, 6.0)), verify=MEASURED.verify)
    assert StepSeconds.read(json.loads(json.dumps(asdict(MEASURED)))) == MEASURED
    assert str(one).startswith("decode 1: 4000.00, 8: 5000.00, 32: 6000.00; verify 1: 4200.00")


@pytest.mark.parametrize(
    ("share", "of_draft", "expected"), [(0.9, 0.1, 3), (0.5, 0.1, 2), (0.3, 0.1, 1), (0.9, 1.5, 1)]
)
def test_as_many_passes_run_as_pay(share, of_draft, expected):
    """Rows cost nothing here; each draft costs a pass behind every step."""
    measured = StepSeconds(
        decode=((1, 1.0),),
        verify=((1, 1.0), (9, 1.0)),
        one_draft=((1, of_draft),),
        drafts=((1, 3.5 * of_draft),),
        most=3,
    )
    costs = DraftCosts(measured)
    rates = [
        (1 + sum(share**place for place in range(1, count + 1))) / costs.expected(1, 3, count)[-1]
        for count in (1, 2, 3)
    ]
    found = choose_passes(np.array([share]), 3, 1, lambda count: costs.expected(1, 3, count))
    assert found == 1 + int(np.argmax(rates)) == expected


def test_drafts_pay_if_they_do_with_some_number_of_passes():
    """One cheap draft pays, and three do not; then three pay, also while no sequence waits for its drafts."""
    config = SpeculationConfig(method="mtp", num_draft_tokens=3)
    times = {"decode": ((1, 1.0),), "verify": ((2, 1.0), (4, 2.6)), "one_draft": ((1, 0.2),)}
    measured = StepSeconds(**times, drafts=((1, 3.0),), most=3)
    drafts = make_speculator(config, measured)
    seq = sequence([1], output=[4])

    def run(count: int, taking: list[Sequence]) -> tuple[bool, int]:
        for _ in range(count):
            seq.token_ids.append(4)
            drafts.committed(new_tokens(seq), Drafts.known([(4,)]))
            drafts.settle()
            vote_alone(drafts, 1, budget(measured))
            list(drafts.drafts(taking, 1, 8))
        return seq.speculates, drafts.wish([seq], 1, prompts=False)[1]

    assert run(40, [seq]) == (True, 1)
    measured = StepSeconds(
        decode=((1, 1.0),),
        verify=((2, 1.9), (4, 1.9)),
        one_draft=((1, 0.2),),
        drafts=((1, 0.4),),
        most=3,
    )
    drafts._costs = DraftCosts(measured)
    assert run(16, []) == (True, 3)


def test_a_draft_model_that_does_not_pay_drafts_one_token_now_and_then():
    config = SpeculationConfig(method="mtp", num_draft_tokens=3)
    drafts = make_speculator(config, MEASURED)
    seq = sequence([1], output=[4])
    assert drafts.wish([seq], 1, prompts=False)[1] == 3, "a new sequence"
    drafts.committed(new_tokens(seq), Drafts.known([(5, 6, 7)]))
    drafts.settle()
    assert seq.speculates
    list(drafts.drafts([seq], 1, 8))
    for token in range(100, 140):
        seq.token_ids.append(token)
        drafts.committed(new_tokens(seq), Drafts.known([(5, 6, 7)]))
        drafts.settle()
        vote_alone(drafts, 1, budget(MEASURED))
    assert not seq.speculates
    found = [drafts.wish([seq], step, prompts=False)[1] for step in range(4 * PROBE_EVERY)]
    assert found == ([1] + [0] * (PROBE_EVERY - 1)) * 4
    while not seq.speculates:
        seq.token_ids.append(8)
        drafts.committed(new_tokens(seq), Drafts.known([(8,)]))
        drafts.settle()
        vote_alone(drafts, 1, budget(MEASURED))
    assert 0 < drafts.wish([seq], 1, prompts=False)[1] < 3
    for _ in range(40):
        seq.token_ids.append(8)
        drafts.committed(new_tokens(seq), Drafts.known([(8,)]))
        drafts.settle()
        vote_alone(drafts, 1, budget(MEASURED))
        list(drafts.drafts([seq], 1, 8))
    assert drafts.wish([seq], 1, prompts=False)[1] == 3
    always = make_speculator(config.model_copy(update={"adaptive": False}), MEASURED)
    assert always.wish([seq], 1, prompts=False)[1] == 3


# What a start on one H200 measured, Qwen3.6-35B-A3B in FP8.
H200 = StepSeconds(
    decode=((1, 2.96), (8, 4.63), (32, 8.61), (128, 12.17)),
    verify=((1, 3.0), (4, 3.89), (32, 8.75), (128, 12.32), (512, 15.97)),
    first=((1, 0.12), (128, 0.34), (512, 0.42)),
    one_draft=((1, 0.29), (128, 0.46)),
    drafts=((1, 1.07), (8, 1.2), (32, 1.47), (128, 2.0)),
    most=3,
)


def test_a_new_sequence_has_drafts_before_its_first_guesses_are_counted():
    drafts = make_speculator(SpeculationConfig(method="mtp", num_draft_tokens=3), H200)
    old, new = sequence([1]), sequence([2])
    for seq in (old, new):
        seq.token_ids.append(4)
        drafts.committed(new_tokens(seq), Drafts.known([(5, 6, 7)]))
        if seq is old:
            drafts.settle()
    assert dict(drafts.drafts([old, new], 2, 8)).keys() == {old, new}
    assert drafts.wish([old, new], 1, prompts=False)[0]
    drafts.settle()
    assert old.speculates and new.speculates


def test_votes_stay_alike_for_some_steps_but_behind_a_new_sequence():
    """The acceptance and the excess change in each step."""
    config, chance = SpeculationConfig(method="ngram", num_draft_tokens=3), Random(0)
    drafts = make_speculator(config, MEASURED)
    seqs = [sequence([1], output=[4] * 9)]

    def votes(count: int) -> list[dict[str, int]]:
        found = []
        for _ in range(count):
            for seq in seqs:
                seq.token_ids.append(4 if chance.random() < 0.7 else 5)
                drafts.committed(new_tokens(seq))
            drafts.observe(StepSize(4, True), 5 + chance.random())
            drafts.settle()
            found.append(drafts.vote(len(seqs)))
        return found

    def changes(of: list[dict[str, int]]) -> list[int]:
        return [place for place, (one, other) in enumerate(pairwise(of), 1) if one != other]

    assert changes(votes(8))[:2] == [1, 3]
    steady = votes(4 * VOTES_ALIKE)
    assert {b - a for a, b in pairwise(changes(steady))} == {VOTES_ALIKE}
    seqs.append(sequence([2], output=[4] * 9))
    assert votes(1)[0]["drafts"] == 2 * steady[-1]["drafts"] == 6


def test_a_draft_model_sleeps_while_drafts_of_no_sequence_pay():
    """It reads prompts, and now and then the steps of a sequence, so that drafts may pay again."""
    drafts = make_speculator(SpeculationConfig(method="mtp", num_draft_tokens=3), MEASURED)
    steps = iter(range(10_000))

    def serve(right: bool, length: int) -> tuple[int, bool]:
        """Return how many steps of a new sequence were read, and whether drafts paid at the end."""
        seq, num_read, passes = sequence([1]), 0, 0
        assert drafts.wish([seq], next(steps), prompts=True)[0]
        for _ in range(length):
            seq.token_ids.append(4)
            made = Drafts.known([(4 if right else 5,)]) if passes else None
            drafts.committed(new_tokens(seq), made)
            drafts.settle()
            list(drafts.drafts([seq], 1, 8))
            vote_alone(drafts, 1, budget(MEASURED))
            reads, passes = drafts.wish([seq], next(steps), prompts=False)
            if not reads:
                drafts.left_out([seq])
            num_read += reads
            assert reads or not seq.speculates
        drafts.forget(seq)
        return num_read, passes > 0

    assert PATIENCE <= serve(False, 200)[0] < 2 * PATIENCE
    wrong = [serve(False, 99)[0] for _ in range(20)]
    assert PATIENCE < sum(wrong) < 6 * PATIENCE and wrong.count(0) > 10
    found = [serve(True, 200) for _ in range(8)]
    assert found[-1] == (200, True)
    assert not drafts._left_out and not drafts._patience


@pytest.mark.parametrize(("num_seqs", "gain"), [(1, 1.2), (32, 1.3), (128, 1.4)])
def test_drafts_that_pay_are_taken_though_the_first_steps_were_slow(num_seqs, gain):
    """A first step that took three times as long made drafts look dear for ever."""
    lengths, num_steps = (0.8, 0.65, 0.5), 300 + 1200 // num_seqs
    assert speed(num_seqs, lengths, num_steps, dear=1.0, slow=3.0) > gain


@pytest.mark.parametrize(("num_seqs", "least"), [(8, 0.9935), (32, 0.9957)])
def test_drafts_that_do_not_pay_cost_little(num_seqs, least):
    """Those of the first steps, and what the draft model reads until it knows better."""
    assert speed(num_seqs, (0.1,), 400, dear=0.0, slow=1.0) > least


def speed(
    num_seqs: int, lengths: tuple[float, ...], num_steps: int, *, dear: float, slow: float
) -> float:
    """Return the tokens per second of steps with drafts that are accepted so, over those without.

    dear   ms by which a step with drafts takes longer than was measured
    slow   factor of the first steps with drafts
    """
    chance = np.random.default_rng(0)
    config = SpeculationConfig(method="mtp", num_draft_tokens=3, accept_lengths=lengths)
    drafts, seqs = make_speculator(config, H200), [sequence([1]) for _ in range(num_seqs)]
    seconds, tokens, verifies = 0.0, 0.0, False
    for step in range(num_steps):
        vote_alone(drafts, num_seqs, budget(H200), verifies=verifies)
        found = dict(drafts.drafts([s for s in seqs if s.speculates], num_seqs, 4 * num_seqs))
        reads, passes = drafts.wish(seqs, step, prompts=not step)
        if not reads:
            drafts.left_out(seqs)
        rows = num_seqs + sum(map(len, found.values()))
        size = StepSize(rows, bool(found), num_seqs if reads else 0, passes)
        verifies = bool(found)
        took = float(H200.of(*size)) + dear * verifies
        drafts.observe(size, slow * took if len(found) and tokens < 4 * num_seqs else took)
        for seq in seqs:
            own = len(found.get(seq, ()))
            right = chance.random(own) < lengths[:own]
            accepted = int(np.cumprod(right).sum())
            seq.token_ids += [7] * (accepted + 1)
            made = Drafts.known([(5,) * passes]) if passes else None
            drafts.committed(new_tokens(seq, accepted, own), made)
            tokens += accepted + 1
        drafts.settle()
        seconds += took
    return tokens / seconds / num_seqs * float(H200.of(num_seqs, False))
