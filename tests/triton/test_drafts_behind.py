"""Drafts that count, and where forwards go on behind them: kernels against NumPy, and against operators of torch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.triton.drafts_behind import MOST_ROWS, NOT_GIVEN, enter_draws, step_back
from tests.distributed.engine_harness import make_request
from tests.triton.device import COMPILED, DEVICE
from tests.unit.test_forward_batch import CPU, MAX_SEQS, builder_of, scheduled
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import DECODE, PROMPT, VERIFY, ScheduledSequence, Sequence

NUM_ROWS, NUM_DRAFTS = 9, 3
NEVER = np.iinfo(np.int64).max


def there(values: object) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(DEVICE)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_enter_draws(keeps: bool, given: bool, seed: int) -> None:
    """Of decodes, drafts that are known or not yet, prompts without a draw, and draws that are no token."""
    chance = np.random.default_rng(seed)
    count_B = chance.permutation([1, 0, 4, 2, 3, 1, 0, MOST_ROWS if seed == 1 else 4])
    first_B, rows_B = count_B.cumsum() - count_B, chance.permutation(NUM_ROWS)[: len(count_B)]
    last = chance.integers(0, 3, NUM_ROWS * (1 + NUM_DRAFTS))
    token_L, draft_L = chance.integers(0, 2, (2, count_B.sum()))
    token_L[chance.random(len(token_L)) < 0.1] = -1
    late_L = (chance.random(len(token_L)) < 0.3) & keeps
    known_L = draft_L.copy()
    references = chance.integers(NUM_ROWS, len(last), late_L.sum())
    draft_L[late_L], known_L[late_L] = -1 - references, last[references]
    ends = (first_B + count_B - 1)[count_B > 0]
    draft_L[ends] = known_L[ends] = NEVER
    given_B = np.full(len(count_B), NOT_GIVEN)
    if given:
        given_B = np.minimum(1 + chance.integers(0, 3, len(count_B)), count_B)
    expected, after, rejected = [], last.copy(), np.full(NUM_ROWS, 7)
    for first, count, row, number in zip(first_B, count_B, rows_B, given_B, strict=True):
        own = slice(first, first + count)
        right = token_L[own] == known_L[own]
        accepted = max(0, number - 1) if given else int(np.cumprod(right).sum())
        expected.append(accepted)
        if keeps and count:
            after[row], rejected[row] = max(0, token_L[first + accepted]), count - 1 - accepted
    kept, rejected_R = there(last), there([7] * NUM_ROWS)
    found = enter_draws(
        there(np.stack((first_B, count_B, given_B))),
        there(draft_L[: 0 if given else None]),
        there(token_L),
        there(np.repeat(rows_B, count_B)),
        kept if keeps else None,
        rejected_R,
        int(count_B.max()),
    )
    assert found.tolist() == expected
    assert kept.tolist() == after.tolist() and rejected_R.tolist() == rejected.tolist()


@pytest.mark.parametrize("ropes", [False, True])
def test_step_back(ropes: bool) -> None:
    """Sequences that stay, that have all drafts right, and that step back over the end of a block."""
    rows, counts, size = [2, -1, 5, -1, 4], [3, 1, 40, 50, 4], 16
    rejected = [9, 9, 2, 9, 0, 17]
    starts, total = np.cumsum([0, *counts[:-1]]), sum(counts)
    chance = np.random.default_rng(0)
    firsts = chance.integers(20, 60, len(rows))
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
    table = chance.integers(0, 1000, (len(rows), 8))
    seq_T = np.repeat(np.arange(len(rows)), counts)
    back = [rejected[row] if row >= 0 else 0 for row in rows]
    slots = table[seq_T, positions // size] * size + positions % size
    behind = positions - np.array(back)[seq_T]
    expected = table[seq_T, behind // size] * size + behind % size
    rope = np.stack((positions, positions + 5, positions + 7), axis=1)
    positions_T, slots_T, rope_T = there([*positions, 0]), there([*slots, 3]), there(rope.copy())
    found = step_back(
        there(np.stack((rows, starts, counts))),
        there(rejected),
        positions_T,
        rope_T if ropes else None,
        there(table),
        slots_T,
        size,
    )
    assert found.tolist() == back == [2, 0, 17, 0, 0]
    assert positions_T.tolist() == [*behind, 0] and slots_T.tolist() == [*expected, 3]
    assert len(positions) == total
    assert rope_T.tolist() == (rope - np.array(back)[seq_T][:, None] * ropes).tolist()


@pytest.mark.skipif(COMPILED, reason="tests/gpu runs whole engines")
def test_a_batch_steps_back_as_by_operators() -> None:
    found = []
    for fused in (False, True):
        rows, step = scheduled([(4, 1, 1), (17, 3, 3), (6, 2, 2)])
        first, second = (seq.row for seq in step.seqs[1:])
        rows[0].num_tokens[[first, second]] = 14, 5
        accepted = AcceptedDrafts(MAX_SEQS, 3, CPU)
        accepted.rejected_R[[first, second]] = torch.tensor([3, 0])
        accepted.fused = fused
        builder = builder_of(rows, accepted=accepted)
        builder.warm_up()
        batch = builder.build(step, 8, graph=True, follows=True)
        assert batch.behind is not None
        names = "positions", "slot_mapping", "behind"
        found.append([getattr(batch, name).tolist() for name in names])
    assert found[0] == found[1] and found[1][2] == [0, 3, 0]


@pytest.mark.skipif(COMPILED, reason="tests/gpu runs whole engines")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_draws_are_entered_as_by_operators(given: bool, asynchronous: bool) -> None:
    for seed in range(10):
        chance = np.random.default_rng(seed)
        parts = []
        for _ in range(6):
            seq, number = Sequence.from_request(make_request("a", [1])), int(chance.integers(1, 4))
            parts += {
                0: [ScheduledSequence(seq, DECODE, 1, 1)],
                1: [ScheduledSequence(seq, PROMPT, 3, number % 2)],
                2: [ScheduledSequence(seq, VERIFY, 1 + number, 1 + number, (3,) * number)],
            }[int(chance.integers(3))]
        batch = ScheduledBatch.of(parts)
        if batch.draft_token_ids is None:
            continue
        token_L = torch.from_numpy(chance.choice([3, 3, 4, -1], len(batch.logits_seqs)))
        assert len(parts) <= MAX_SEQS
        rows_B = chance.permutation(MAX_SEQS)[: len(parts)]
        place: Any = SimpleNamespace(sampling_rows=torch.from_numpy(rows_B[batch.logits_seqs]))
        counts_B = chance.integers(1, 3, len(parts)).clip(max=batch.num_logits) if given else None
        states = []
        for fused in (False, True):
            accepted = AcceptedDrafts(MAX_SEQS, 3, CPU, asynchronous=asynchronous)
            accepted.fused = fused
            accepted.enter(batch, place, token_L, counts_B)
            last = accepted.last_tokens
            states.append((None if last is None else last.tolist(), accepted.rejected_R.tolist()))
        assert states[0] == states[1]
