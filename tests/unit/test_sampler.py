"""The sampler: right distribution, filters equal to a plain reference, nothing depends on the batch."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS
from workers.sampling.token_sampling import (
    ALL_GREEDY,
    SamplingBatch,
    SamplingTable,
    filter_weights,
    sample_tokens,
    uniforms,
)
from workers.wire.request import SamplingParams

torch.set_num_threads(1)


def make(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    return sample_tokens(logits, SamplingBatch.from_rows(params, np.array(positions))).tolist()


def draw_many(logits_V: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """Tokens at positions 0 .. count - 1 of one request with the same logits everywhere."""
    batch = SamplingBatch.from_rows([params] * count, np.arange(count))
    return sample_tokens(logits_V.expand(count, -1), batch)


def reference_kept(weights_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens stay, said plainly: min_p and top_k first, then top_p among what they left."""
    floor = float(np.float32(params.min_p * weights_V.max()))
    best_first = sorted(weights_V.tolist(), reverse=True)
    if params.top_k:
        best_first = best_first[: params.top_k]
    best_first = [weight for weight in best_first if weight >= floor]
    if params.top_k or params.top_p < 1:
        nucleus: list[float] = []
        while not nucleus or (
            len(nucleus) < len(best_first)
            and (params.top_p == 1 or sum(nucleus) < params.top_p * sum(best_first))
        ):
            nucleus.append(best_first[len(nucleus)])
        floor = nucleus[-1]
    return weights_V >= np.float32(floor)


# Multiples of 1/8 and small vocabularies give many ties and sums that float64 holds exactly enough.
any_params = st.builds(
    make,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.97, 0.81, 0.5003, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.013, 0.2, 1.0]),
    seed=st.integers(-(2**70), 2**70),
)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, 1), (0.5000001, 2), (0.75, 2), (0.7500001, 3), (0.875, 3), (0.9, 4)]
)
def test_top_p_at_an_exact_boundary_keeps_no_token_too_many(top_p, kept):
    """The sum of the kept weights reaches top_p exactly: the token that reaches it is the last one."""
    weights = torch.tensor([[1.0, 0.5, 0.25, 0.125, 0.125]])
    values = SamplingTable(1)
    values.set(0, make(top_p=top_p))
    batch = values.batch(np.array([0]), np.array([0]))
    found = filter_weights(weights, torch.from_numpy(batch.values), batch.filters)
    assert (found > 0).tolist() == [[index < kept or (kept == 4) for index in range(5)]]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-24, 24), min_size=7, max_size=7), any_params),
        min_size=1,
        max_size=5,
    )
)
def test_filters_equal_the_reference(rows: list[tuple[list[int], SamplingParams]]) -> None:
    logits_FV = torch.tensor([eighths for eighths, _ in rows]) / 8
    weights_FV = (logits_FV - logits_FV.amax(1, keepdim=True)).exp()
    batch = SamplingBatch.from_rows([params for _, params in rows], np.zeros(len(rows), int))
    if batch.filters is None:
        return
    assert batch.values is not None and batch.rows is not None
    values_F6 = torch.from_numpy(batch.values[batch.rows])
    weights_FV = weights_FV[batch.rows]
    rows = [rows[row] for row in batch.rows]
    kept_FV = filter_weights(weights_FV, values_F6, batch.filters)
    for weights_V, kept_V, (_, params) in zip(weights_FV, kept_FV, rows, strict=True):
        expected = reference_kept(weights_V.numpy(), params)
        assert ((kept_V > 0).numpy() == expected).all()
        assert torch.equal(kept_V[kept_V > 0], weights_V[kept_V > 0])


@given(
    st.lists(st.tuples(any_params, st.integers(0, 2**40), st.booleans()), min_size=2, max_size=9),
    st.integers(0, 2**32 - 1),
    st.randoms(use_true_random=False),
)
def test_a_row_does_not_depend_on_the_others(
    rows: list[tuple[SamplingParams, int, bool]], seed: int, random: object
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 50, generator=generator) * 3
    params = [make(temperature=0.0) if greedy else p for p, _, greedy in rows]
    positions = [position for _, position, _ in rows]
    together = draw(logits, params, positions)
    alone = [draw(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(len(rows))]
    assert together == alone
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = draw(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize(
    "params",
    [
        make(seed=1),
        make(seed=2, temperature=0.6),
        make(seed=3, temperature=2.5),
        make(seed=4, top_k=5),
        make(seed=5, top_p=0.8),
        make(seed=6, min_p=0.1, temperature=1.5),
        make(seed=7, min_p=0.02, top_k=9, top_p=0.9),
    ],
    ids=str,
)
def test_distribution(params: SamplingParams) -> None:
    count = 40_000
    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 2
    weights_V = ((logits_V - logits_V.max()) / params.temperature).exp().numpy()
    expected_V = np.where(reference_kept(weights_V, params), weights_V, 0).astype(np.float64)
    expected_V *= count / expected_V.sum()
    found_V = np.bincount(draw_many(logits_V, params, count).numpy(), minlength=20)
    assert (found_V[expected_V == 0] == 0).all()
    likely = expected_V > 5
    chi_square = ((found_V - expected_V)[likely] ** 2 / expected_V[likely]).sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_uniforms_are_uniform_and_independent() -> None:
    keys = SamplingTable(4)
    for row, seed in enumerate((0, 1, 2, 2**63)):
        keys.set(row, make(seed=seed))
    positions = np.arange(50_000)
    streams = [uniforms(keys._keys[[row] * len(positions)], positions) for row in range(4)]
    for stream in streams:
        assert stream.min() >= 0 and stream.max() < 1
        found = np.bincount((stream * 100).astype(int), minlength=100)
        assert ((found - 500.0) ** 2 / 500).sum() < 99 + 4 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(stream[1:], stream[:-1])[0, 1]) < 0.02
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.02
    assert len(np.unique(np.concatenate(streams))) == 4 * len(positions)


def test_neighbouring_seeds_give_other_tokens() -> None:
    logits_V = torch.zeros(64)
    tokens = [draw_many(logits_V, make(seed=seed), 256) for seed in (0, 1, -1)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (tokens[first] == tokens[second]).float().mean() < 0.1


def test_numbers_are_splitmix64() -> None:
    """Said again in Python's integers, so that no upgrade changes what a seed means."""

    def finalise(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    logits_V = torch.linspace(0, 3, 1000)
    weights_V = ((logits_V - 3) / torch.tensor(0.9)).exp().double().tolist()
    tokens = draw_many(logits_V, make(seed=42, temperature=0.9), 20)
    for position, token in enumerate(tokens.tolist()):
        counter = (finalise(42) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        target = (finalise(counter) >> 11) / 2**53 * sum(weights_V)
        assert sum(weights_V[:token]) <= target < sum(weights_V[: token + 1])


def test_small_changes_of_logits_change_few_tokens() -> None:
    """Two almost equal tokens: the last bit must not decide which of them a number stands for."""
    logits_V = torch.tensor([1.0, 1.0, -5.0])
    swapped_V = logits_V + torch.tensor([-1e-6, 1e-6, 0.0])
    for params in (make(), make(top_k=2), make(top_p=0.99)):
        first, second = (draw_many(row, params, 2000) for row in (logits_V, swapped_V))
        assert (first != second).sum() <= 2


def test_greedy_and_tiny_temperature() -> None:
    logits = torch.randn(6, 99, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(1).tolist()
    assert draw(logits, [make(temperature=0.0)] * 6, [0] * 6) == best
    assert draw(logits, [make(temperature=1e-30, seed=s) for s in range(6)], [0] * 6) == best
    assert draw(logits, [make(top_k=1, seed=s) for s in range(6)], [0] * 6) == best
    assert draw(logits, [make(top_p=1e-9, seed=s) for s in range(6)], [0] * 6) == best
    mixed = [make(temperature=0.0), make(temperature=5.0, seed=9)] * 3
    assert draw(logits, mixed, list(range(6)))[::2] == best[::2]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits_V = torch.full((40,), -torch.inf)
    logits_V[[0, 17, 39]] = torch.tensor([0.0, 1.0, 0.5])
    for params in (make(seed=1), make(seed=2, top_p=0.9999), make(seed=3, top_k=30)):
        assert set(draw_many(logits_V, params, 500).tolist()) == {0, 17, 39}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "params", [make(temperature=0.0), make(), make(top_k=2), make(top_p=0.5), make(min_p=0.1)]
)
def test_bad_logits_end_their_row_only(bad: float, params: SamplingParams) -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(3))
    healthy = draw(logits, [params] * 3, [1, 2, 3])
    logits[1, 11] = bad
    assert draw(logits, [params] * 3, [1, 2, 3]) == [healthy[0], INVALID_LOGITS, healthy[2]]
    logits[1] = -torch.inf
    assert draw(logits, [params] * 3, [1, 2, 3]) == [healthy[0], ALL_FORBIDDEN, healthy[2]]
    logits[1, 11] = bad
    assert draw(logits, [params] * 3, [1, 2, 3]) == [healthy[0], INVALID_LOGITS, healthy[2]]


def test_slots_are_reused() -> None:
    table = SamplingTable(4)
    table.set(2, make(top_k=1, seed=5))
    table.set(2, make(temperature=0.0))
    assert table.batch(np.array([2]), np.array([7])) is ALL_GREEDY
    table.set(2, make(seed=5))
    batch = table.batch(np.array([2, 0]), np.array([7, 7]))
    assert batch.filters is None
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    assert sample_tokens(logits, batch).tolist() == [
        draw(logits[:1], [make(seed=5)], [7])[0],
        int(logits[1].argmax()),
    ]


def test_no_rows() -> None:
    table = SamplingTable(1)
    none = np.empty(0, np.int64)
    assert sample_tokens(torch.empty(0, 10), table.batch(none, none)).tolist() == []


def test_all_greedy_is_cheap() -> None:
    """No gathering of parameters, no random numbers: measured 2 us, allow for a busy machine."""
    table = SamplingTable(64)
    rows, positions = np.arange(8), np.arange(8)
    best = min(_seconds(table, rows, positions) for _ in range(200))
    assert best < 50e-6


def _seconds(table: SamplingTable, rows: np.ndarray, positions: np.ndarray) -> float:
    started = time.perf_counter()
    table.batch(rows, positions)
    return time.perf_counter() - started
