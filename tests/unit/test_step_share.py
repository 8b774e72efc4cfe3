"""The share of the vision tower beside steps follows their times without it."""

import pytest

from workers.images.step_share import (
    DECODE_SHARE,
    FIRST_TOKENS,
    OUTLIER,
    PROMPT_SHARE,
    SMOOTHING,
    StepShare,
)
from workers.step.step_sync import StepPlan

TOKEN_S = 15e-6


def plan(prefill_tokens: int = 0, *, decodes: bool = True, cap: int = 0) -> StepPlan:
    return StepPlan(
        True,
        (64 + prefill_tokens,),
        decodes=decodes,
        prefill_tokens=prefill_tokens,
        prefill_cap=cap,
    )


def share_s(share: StepShare, of: StepPlan) -> float:
    """Seconds of the tower beside a step."""
    return share.tokens(of, TOKEN_S) * TOKEN_S


def test_the_share_is_that_of_a_step_without_the_tower() -> None:
    """Also where the tower never pauses: the time of steps is always seen with its share."""
    share = StepShare()
    share.observe(plan(), 0.020, beside=False)
    for _ in range(400):
        own_s = 0.010
        share.observe(plan(), own_s + share_s(share, plan()), beside=True)
    assert share_s(share, plan()) == pytest.approx(DECODE_SHARE * 0.010, rel=0.01)


@pytest.mark.parametrize("beside", [False, True])
def test_prompts_without_a_limit_give_more_time(beside: bool) -> None:
    """The tower makes no step 1.5 times as long, as far as prompts take two thirds of it."""
    share = StepShare()
    share.observe(plan(), 0.012, beside=False)
    for _ in range(400):
        of = plan(1280)
        share.observe(of, 0.028 + (share_s(share, of) if beside else 0), beside=beside)
    expected = DECODE_SHARE * 0.012 + PROMPT_SHARE * 0.016
    assert share_s(share, plan(1280)) == pytest.approx(expected, rel=0.01)
    assert expected < 0.5 * 0.028
    limited = plan(1280, cap=2048)
    assert share_s(share, limited) == pytest.approx(DECODE_SHARE * 0.012)


def test_steps_with_a_limit_of_prompts_have_the_share_of_decodes_alone() -> None:
    share = StepShare()
    share.observe(plan(), 0.012, beside=False)
    share.observe(plan(256, cap=256), 0.017 + DECODE_SHARE * 0.012, beside=True)
    assert share.added_s == {9: pytest.approx(0.005)}


def test_few_prompt_tokens_do_not_stand_for_many() -> None:
    """A prompt of few tokens adds more for each: the kernels of prompts take the place of those of decodes."""
    share = StepShare()
    share.observe(plan(), 0.010, beside=False)
    share.observe(plan(4), 0.014, beside=False)
    decodes_s = DECODE_SHARE * 0.010
    assert share_s(share, plan(2)) == pytest.approx(decodes_s)
    assert share_s(share, plan(2048)) == pytest.approx(decodes_s + PROMPT_SHARE * 0.004)
    share.observe(plan(1024), 0.030, beside=False)
    assert share_s(share, plan(2047)) == pytest.approx(decodes_s + PROMPT_SHARE * 0.020)
    assert share_s(share, plan(512)) == pytest.approx(decodes_s + PROMPT_SHARE * 0.004)


def test_one_long_step_counts_as_four() -> None:
    share = StepShare()
    share.observe(plan(), 0.010, beside=False)
    share.observe(plan(), 9.0, beside=False)
    assert share.decode_s == pytest.approx(0.010 * (1 + SMOOTHING * (OUTLIER - 1)))


def test_until_times_are_known_the_tower_has_a_number_of_tokens() -> None:
    share = StepShare()
    share.observe(plan(900, decodes=False), 0.5, beside=False)
    share.observe(plan(900), 0.5, beside=False)
    assert share.tokens(plan(), TOKEN_S) == FIRST_TOKENS
    assert share.tokens(plan(100), TOKEN_S) == FIRST_TOKENS + 100
    share.observe(plan(), 0.010, beside=False)
    assert share.tokens(plan(), None) == FIRST_TOKENS
    assert share.tokens(plan(), TOKEN_S) == pytest.approx(DECODE_SHARE * 0.010 / TOKEN_S)
