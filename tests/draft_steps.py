"""Sequences that verify drafts step by step in linear attention, beside prompts and decodes; some drafts are wrong.

Outputs of the rows that count, and the states at the end, are those of the recurrence over single tokens. Wrong drafts
have inputs that no token of the sequence has.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import LinearAttention
from tests.closeness import calc_diff
from tests.linear_case import TOLERANCES, LinearCase

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # mixed, a and b
Weights = tuple[torch.Tensor, ...]
Forward = Callable[[LinearAttention, AttentionBatch, Rows, Weights], torch.Tensor]


def eager(
    subject: LinearAttention,
    batch: AttentionBatch,
    rows: Rows,
    weights: Weights,
) -> torch.Tensor:
    """Run one whole forward."""
    conv_weight, neg_exp_a, dt_bias = weights
    subject.plan(batch)
    return subject(*rows, 0, conv_weight, neg_exp_a, dt_bias)


def in_ubatches(cuts: list[int]) -> Forward:
    """Return a forward in ubatches that are cut at these rows."""

    def run(
        subject: LinearAttention,
        batch: AttentionBatch,
        rows: Rows,
        weights: Weights,
    ) -> torch.Tensor:
        ends = [*sorted({cut for cut in cuts if cut < len(rows[0])}), len(rows[0])]
        outs = []
        for start, end in zip([0, *ends], ends, strict=False):
            if start < end:
                part = rows[0][start:end], rows[1][start:end], rows[2][start:end]
                outs.append(eager(subject, batch.ubatch(start, end), part, weights))
        return torch.cat(outs)

    return run


@dataclass(frozen=True)
class Part:
    """The part of a sequence in a step: `num_right` rows are its next tokens, the rows behind are wrong drafts."""

    seq: int
    num_rows: int
    num_right: int
    prompt: bool = False


class DraftSteps:
    """One layer, with the tokens of some sequences still to come."""

    def __init__(
        self,
        backend: type[LinearAttention],
        spec: LinearAttentionSpec,
        lengths: list[int],
        num_drafts: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 1,
        forward: Forward = eager,
        tolerance: float | None = None,
        padding: int = 3,
    ):
        self.spec, self.dtype, self.device = replace(spec, num_drafts=num_drafts), dtype, device
        self.case = LinearCase([spec], [(n - 1, 1) for n in lengths], dtype=dtype, seed=seed)
        self.done, self.forward = [0] * len(lengths), forward
        self.padding = padding  # most rows of it
        # States in bfloat16 are rounded at each token.
        limits = TOLERANCES[dtype], 1e-4 if spec.state_dtype == "bfloat16" else 0.0
        self.tolerance = tolerance or max(limits)
        self.prompting: set[int] = set()  # sequences with a part of a prompt in the last step
        self.subject = backend([self.spec])
        num_slots = 2 * len(lengths) + 2
        place = dtype, torch.device(device)
        states = backend.allocate([self.spec], num_slots, *place, num_rows=num_slots)
        for pool in (states[0].conv, states[0].state, states[0].drafts):
            pool.fill_(math.nan)
        states[0].accepted.fill_(num_drafts)  # of sequences that had the slots before
        self.subject.bind(states)
        self.slots = self.case.slots.to(device)

    def step(self, parts: list[Part], padding: int = 0) -> None:
        """Run the parts, in the order of a batch, and check the outputs of the rows that count."""
        layer = self.case.layers[0]
        columns: list[list[torch.Tensor]] = [[], [], []]
        for part in parts:
            start = self.done[part.seq]
            for x, of in zip(columns, (layer.mixed, layer.a, layer.b), strict=True):
                right = of[part.seq][start : start + part.num_right]
                shape = part.num_rows - part.num_right, right.shape[1]
                wrong = torch.randn(shape, generator=self.case.generator) * 2
                x.append(torch.cat((right, wrong.to(self.dtype))))
        total = sum(part.num_rows for part in parts)
        mixed, a, b = (
            torch.cat([*x, x[0].new_ones(padding, x[0].shape[1])]).to(self.device) for x in columns
        )
        batch = self._batch(parts)
        out_TVv = self.forward(self.subject, batch, (mixed, a, b), layer.weights(self.device)).cpu()
        assert batch.state_slots is not None
        accepted = [0 if part.prompt else part.num_right - 1 for part in parts]
        self.subject.accept(
            batch.state_slots, torch.tensor(accepted, device=self.device) if any(accepted) else None
        )
        assert not out_TVv[total:].any() and out_TVv[:total].isfinite().all()
        start = 0
        for part in parts:
            done = self.done[part.seq]
            expected = self.case.expected[0][part.seq][0][done : done + part.num_right]
            assert calc_diff(out_TVv[start : start + part.num_right], expected) < self.tolerance
            self.done[part.seq] += part.num_right
            start += part.num_rows

    def _batch(self, parts: list[Part]) -> AttentionBatch:
        counts = [part.num_rows for part in parts]
        singles = sum(count == 1 for count in counts)
        prompts = sum(part.prompt and part.num_rows > 1 for part in parts)
        slots = self.slots[[part.seq for part in parts]]
        lens = [self.done[part.seq] + part.num_rows for part in parts]
        return AttentionBatch(
            num_tokens=sum(counts),
            num_seqs=len(parts),
            num_single_rows=singles,
            num_verify=len(parts) - singles - prompts,
            query_start_loc_cpu=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens_cpu=np.array(lens, dtype=np.int32),
            block_table=torch.zeros(len(parts), 1, dtype=torch.int64, device=self.device),
            slot_mapping=torch.zeros(sum(counts), dtype=torch.int64, device=self.device),
            state_slots=slots,
        )

    def parts(self, chance: np.random.Generator) -> list[Part]:
        """Return parts of some sequences that have tokens left, in the order of a batch."""
        singles: list[Part] = []
        verify: list[Part] = []
        prompts: list[Part] = []
        lengths = [len(x) for x in self.case.layers[0].mixed]
        for seq, (done, length) in enumerate(zip(self.done, lengths, strict=True)):
            left = length - 1 - done  # the last token is that of `finish`
            if left < 1 or chance.random() < 0.2:
                continue
            if done == 0 or chance.random() < 0.1:  # a part of a prompt follows only prompts
                if done and seq not in self.prompting:
                    continue
                count = int(chance.integers(1, min(left, 9) + 1))
                part = Part(seq, count, count, prompt=True)
                (prompts if count > 1 else singles).append(part)
                continue
            count = int(chance.integers(1, self.spec.num_drafts + 2))
            right = int(chance.integers(1, min(count, left) + 1))
            (verify if count > 1 else singles).append(Part(seq, count, right))
        self.prompting = {part.seq for part in (*singles, *prompts) if part.prompt}
        return [*singles, *verify, *prompts]

    def finish(self, chance: np.random.Generator) -> None:
        """Run all tokens in random steps, and check the states behind them."""
        while any(
            len(x) - 1 > n for x, n in zip(self.case.layers[0].mixed, self.done, strict=True)
        ):
            if parts := self.parts(chance):
                self.step(parts, int(chance.integers(0, self.padding + 1)))
        self.step([Part(seq, 1, 1) for seq in range(len(self.done))])
        pool = self.subject.states[0]
        for seq, slot in enumerate(self.slots.tolist()):
            state = self.case.expected[0][seq][2]
            assert calc_diff(pool.state[slot].cpu(), state) < self.tolerance, seq
            tail = self.case.tail(0, seq, len(self.case.layers[0].mixed[seq]))
            assert torch.equal(pool.conv[slot].cpu(), tail)
        others = torch.ones(len(pool.state), dtype=torch.bool)
        others[self.slots.cpu()] = False
        for x in (pool.state, pool.conv, pool.drafts):
            assert x.cpu()[others].isnan().all()
