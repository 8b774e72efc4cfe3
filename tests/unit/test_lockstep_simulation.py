"""The model of steps, its error on sizes that were held back, and simulated ranks."""

import time
from pathlib import Path

import numpy as np
import pytest

from cluster.bench.lengths import Lengths
from cluster.experiments.comparison import Results
from scripts.bench import lockstep_simulation
from scripts.bench.lockstep import simulate_folder
from scripts.bench.lockstep_model import Point, StepModel, fit_positive, remote_ranks, split
from scripts.bench.lockstep_simulation import Traffic, simulate

SIZES = (8, 16, 32, 64, 128, 256)
LAYERS, TOP_K = 4, 2


# Each of N - 1 other ranks has none of 2 experts with the probability (1 - 1/N)^2: N = 2: 1 - 1/4; N = 4: 3 (1 - 9/16).
REMOTE = {1: 0.0, 2: 0.75, 4: 1.3125}


def point(ranks: int, tokens: int, noise: float = 1.0) -> Point:
    """A measurement that follows the model: 20 + 5 (N - 1) + T (0.1 + 0.4 remote) us; groups take 0.5 ms more."""
    exchange = 20 + 5 * (ranks - 1) + tokens * (0.1 + 0.4 * REMOTE[ranks])
    exchange = noise * exchange if ranks > 1 else 0.0
    step = 2 + 0.01 * tokens + 0.5 * (ranks > 1) + LAYERS * exchange / 1e3
    return Point(ranks, tokens, step, exchange, 4.0 * ranks)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return [point(ranks, tokens) for ranks in (1, 2, 4) for tokens in SIZES]


def fit(points: list[Point]) -> StepModel:
    return StepModel.fit(points, layers=LAYERS, top_k=TOP_K, cores=None)


def traffic(steps: int = 300) -> Traffic:
    lengths = Lengths.parse("lognormal:128:0.8:1024"), Lengths.parse("lognormal:64:0.6:512")
    return Traffic(16, 256, *lengths, steps)


def test_other_ranks_with_an_expert_of_a_token() -> None:
    assert {ranks: remote_ranks(ranks, TOP_K) for ranks in REMOTE} == REMOTE
    # 9 other ranks, each without the 3 experts with the probability 0.9^3 = 0.729: 9 * 0.271.
    assert remote_ranks(10, 3) == pytest.approx(2.439)


def test_the_fit_finds_the_law_and_predicts_what_it_has_not_seen(points: list[Point]) -> None:
    seen, held = split(points, (16, 128))
    assert len(held) == 6
    model = fit(seen)
    assert model.exchange == pytest.approx((20, 5, 0.1, 0.4), rel=1e-3)
    assert model.compute == pytest.approx((2, 0.01, 0.5))
    group = [p for p in held if p.ranks > 1]
    assert model.exchange_error(group).largest < 1e-6
    assert model.step_error(group).largest < 1e-6
    wrong = [point(p.ranks, p.tokens, 1.25) for p in group]
    assert model.exchange_error(wrong).mean == pytest.approx(0.2)


def test_coefficients_are_never_negative() -> None:
    assert fit_positive([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0])[1] == 0
    assert fit_positive([(1.0,), (1.0,)], [2.0, 2.0]) == pytest.approx((2.0,))


def test_ranks_that_share_cores_take_longer() -> None:
    shared = StepModel((10, 0, 1, 0), (1, 0, 0), (1, 0), LAYERS, TOP_K, cores=2)
    tokens = np.asarray(10)
    assert shared.exchange_us(4, tokens) == 2 * shared.exchange_us(2, tokens)
    assert shared.exchange_us(4, tokens, contended=False) == shared.exchange_us(2, tokens)


def test_more_ranks_wait_longer_for_the_slowest(points: list[Point]) -> None:
    model = fit(points)
    outcomes = [simulate(model, traffic(), ranks, 0) for ranks in (1, 2, 16, 64)]
    assert (outcomes[0].compute, outcomes[0].waiting, outcomes[0].exchange) == (1.0, 0.0, 0.0)
    rates = [one.output_tokens_per_s_per_rank for one in outcomes]
    assert rates == sorted(rates, reverse=True)
    waiting = [one.waiting * one.step_ms for one in outcomes]
    assert waiting == sorted(waiting)
    for one in outcomes:
        assert one.compute + one.waiting + one.exchange + one.vote == pytest.approx(1)
    assert simulate(model, traffic(), 16, 0) == outcomes[2], "the seed decides"


def test_a_simulation_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with one sequence each, 4 tokens a step. The first of 5 steps is not counted.

    step   prompt left   tokens   compute ms    all-to-all us   output tokens
    0      6 2 -> 2 0    4 2
    1      2 0 -> 0 0    2 1      2.0 1.5       200             2 (the last part of a prompt gives a token)
    2      0 0           1 1      1.5 1.5       150             2, both end: prompts of 5 and 3 follow
    3      5 3 -> 1 0    4 3      3.0 2.5       300             1
    4      1 0 -> 0 0    1 1      1.5 1.5       150             2, both end
    Compute 1.75 + 1.5 + 2.75 + 1.5 = 7.5 ms, waiting 0.25 + 0.25 = 0.5 ms, all-to-alls of 2 layers 1.6 ms, votes
    4 * 0.2 = 0.8 ms: 10.4 ms for 7 tokens.
    """
    draws = {8: iter((6, 2, 5, 3, 9, 9)), 3: iter((2, 3, 1, 2, 9, 9))}

    def draw(lengths: Lengths, shape: tuple[int, ...], _: np.random.Generator) -> np.ndarray:
        values = [next(draws[lengths.high]) for _ in range(int(np.prod(shape)))]
        return np.asarray(values, np.int64).reshape(shape)

    monkeypatch.setattr(lockstep_simulation, "_draw", draw)
    model = StepModel((100, 0, 50, 0), (1.0, 0.5, 0), (200, 0), layers=2, top_k=1, cores=None)
    load = Traffic(1, 4, input_len=Lengths(1, 8), output_len=Lengths(1, 3), steps=5)
    found = simulate(model, load, 2, 0)
    assert found.step_ms == pytest.approx(2.6)
    assert found.output_tokens_per_s_per_rank == pytest.approx(7 / 2 / 0.0104)
    shares = [found.compute, found.waiting, found.exchange, found.vote]
    assert shares == pytest.approx([7.5 / 10.4, 0.5 / 10.4, 1.6 / 10.4, 0.8 / 10.4])


def test_256_ranks_are_simulated_in_seconds(points: list[Point]) -> None:
    started = time.process_time()
    simulate(fit(points), traffic(1000), 256, 0)
    assert time.process_time() - started < 20


def test_the_page_has_errors_and_ranks(points: list[Point], tmp_path: Path) -> None:
    cells = [
        {
            "index": i,
            "name": f"{i}",
            "settings": {"cluster.ranks": p.ranks, "workload.tokens": p.tokens},
        }
        for i, p in enumerate(points)
    ]
    settings = {"ranks": [16, 256], "held_back": [16, 128], "steps": 50, "sequences": 8}
    settings |= {"max_tokens": 128, "input_len": 64, "output_len": "8-32"}
    head = {
        "title": "T",
        "seed": 0,
        "model": {"layers": LAYERS, "top_k": TOP_K, "cores": None},
        "cells": cells,
    }
    lines = [
        {"cell": i, "repeat": 1, "error": None, "metrics": vars(p)} for i, p in enumerate(points)
    ]
    text = simulate_folder(tmp_path, Results.of(head, lines), settings)
    assert "| all-to-all, sizes that were held back | 0 % | 0 % | 4 |" in text
    assert "\n| 256 |" in text
    assert (tmp_path / "simulation.json").exists()
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="two numbers of ranks"):
        two = [line for line in lines if cells[line["cell"]]["settings"]["cluster.ranks"] < 4]
        simulate_folder(tmp_path, Results.of(head, two), settings)
    with pytest.raises(ValueError, match="held back"):
        simulate_folder(tmp_path, Results.of(head, lines), {**settings, "held_back": [7]})
