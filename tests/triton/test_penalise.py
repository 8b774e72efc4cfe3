"""Penalties on whole rows of logits, against the operators that are told each row's tokens."""

import numpy as np
import pytest
import torch

from kernels.triton.penalise import penalise
from tests.triton.device import DEVICE


@pytest.mark.parametrize("vocab_size", [50, 9000])
def test_penalise(vocab_size: int):
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(4, vocab_size)).astype(np.float32)
    seen = generator.integers(0, 5, (6, vocab_size)).astype(np.int32)  # bit 0: in the prompt
    rows, slots = [2, 0, 3], [5, 1, 0]
    values = [(0.5, 0.0, 1.0), (-0.3, 0.7, 1.6), (0.0, -0.2, 0.8)]
    expected = logits.copy()
    for row, slot, (presence, frequency, repetition) in zip(rows, slots, values, strict=True):
        x, count = expected[row], seen[slot] >> 1
        repeated = np.where(x > 0, x / np.float32(repetition), x * np.float32(repetition))
        x[:] = np.where(seen[slot] > 0, repeated, x)
        x -= np.float32(frequency) * count + np.float32(presence) * (count > 0)
    found = torch.from_numpy(logits).to(DEVICE, copy=True)
    new = {"device": DEVICE}
    penalise(
        found,
        torch.tensor(rows, **new).unsqueeze(1),
        torch.from_numpy(seen).to(DEVICE),
        torch.tensor(slots, **new).unsqueeze(1),
        torch.tensor(values, **new).T.unsqueeze(2),
    )
    np.testing.assert_allclose(found.cpu().numpy(), expected, atol=1e-5, rtol=1e-5)
    assert (found[1].cpu().numpy() == logits[1]).all()
