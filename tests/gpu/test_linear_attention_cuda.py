"""Linear attention in CUDA graphs: one capture serves batches of any sequences, and padding touches no state."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.batch import AttentionBatch
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import LinearAttention, LinearStates
from kernels.linear_attention.triton_delta import TritonLinearAttention
from tests.draft_steps import DraftSteps, Rows, Weights, eager
from tests.linear_case import LinearCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SPEC = LinearAttentionSpec(4, 8, 128, 128, 4)
ROWS, SEQS = 6, 6
MIXED_ROWS = 200
PROMPTS = 1e-4  # products of prompts have operands of 16 bits


class Captured:
    """A graph of one layer, over pools that each batch is copied into."""

    def __init__(self, rows: int, *, prompts: bool):
        num_slots = 2 * SEQS + 2
        self.num_rows, self.prompts = rows, prompts
        cuda = torch.device("cuda")
        self.subject = TritonLinearAttention([SPEC])
        self.states = self.subject.allocate([SPEC], num_slots, torch.bfloat16, cuda)
        self.subject.bind(self.states)
        self.subject.reserve_graphs(rows, SEQS)
        heads = SPEC.num_value_heads
        self.rows = [
            torch.zeros(rows, width, dtype=torch.bfloat16, device=cuda)
            for width in (SPEC.channels, heads, heads)
        ]
        self.weights = [
            torch.zeros(SPEC.channels, SPEC.conv_width, dtype=torch.bfloat16, device=cuda),
            torch.zeros(heads, device=cuda),
            torch.zeros(heads, device=cuda),
        ]
        self.subject.plan_graph(AttentionBatch.dummy_decodes(SEQS, cuda), rows, prompts=prompts)
        self._call()  # compiles
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._call()

    def _call(self) -> torch.Tensor:
        return self.subject(*self.rows, 0, *self.weights)

    def replay(self, case: LinearCase) -> torch.Tensor:
        """Run a batch; its pools become copies of the graph's."""
        self._copy(self.states, case.states)
        sources = (*case.rows(0), *case.layers[0].weights("cuda"))
        for target, source in zip((*self.rows, *self.weights), sources, strict=True):
            target.copy_(source)
        self.subject.plan_graph(case.batch(), self.num_rows, prompts=self.prompts)
        self.graph.replay()
        self._copy(case.states, self.states)
        return self.out

    @staticmethod
    def _copy(targets: Sequence[LinearStates], sources: Sequence[LinearStates]) -> None:
        for target, source in zip(targets, sources, strict=True):
            slots = min(len(source.conv), len(target.conv))
            target.conv[:slots] = source.conv[:slots]
            target.state[:slots] = source.state[:slots]


@torch.inference_mode()
def test_one_capture_serves_all_decodes():
    captured = Captured(ROWS, prompts=False)
    assert not captured.out.any()
    for seed, contexts in enumerate([[5], [0, 9, 1], [3] * ROWS, [70, 0], [1, 2, 3, 4]]):
        check(captured, [(context, 1) for context in contexts], seed)


@torch.inference_mode()
def test_one_capture_serves_all_steps_with_prompts():
    captured = Captured(MIXED_ROWS, prompts=True)
    for seed, seqs in enumerate(
        [
            [(5, 1), (0, 1), (0, 130), (3, 2)],
            [(0, MIXED_ROWS)],
            [(70, 65), (0, 1 + 64), (64, 64)],
            [(3, 1)] * SEQS,
            [],
            [(9, 1), *[(0, 33)] * 5],
        ]
    ):
        check(captured, seqs, seed, PROMPTS)


def check(
    captured: Captured,
    seqs: list[tuple[int, int]],
    seed: int,
    tolerance: float | None = None,
) -> None:
    padding = captured.num_rows - sum(new for _, new in seqs)
    case = LinearCase([SPEC], seqs, padding=padding, dtype=torch.bfloat16, seed=seed, device="cuda")
    case.check(0, captured.replay(case), tolerance)


class CapturedDrafts:
    """A graph of one layer that serves sequences with drafts, and with prompts too where `prompts` is true."""

    def __init__(self, rows: int, *, prompts: bool):
        self.num_rows, self.prompts = rows, prompts
        self.replays = 0

    def capture(self, subject: LinearAttention) -> None:
        """Capture the subject, bound to its states."""
        heads, cuda = SPEC.num_value_heads, torch.device("cuda")
        subject.reserve_graphs(self.num_rows, SEQS)
        new: dict[str, Any] = {"dtype": torch.bfloat16, "device": cuda}
        self.rows = [
            torch.zeros(self.num_rows, width, **new) for width in (SPEC.channels, heads, heads)
        ]
        gates = torch.zeros(2, heads, device=cuda)
        self.weights = [torch.zeros(SPEC.channels, SPEC.conv_width, **new), *gates]
        decodes = AttentionBatch.dummy_decodes(SEQS, cuda)
        subject.plan_graph(decodes, self.num_rows, prompts=self.prompts, drafts=True)
        subject(*self.rows, 0, *self.weights)  # compiles
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = subject(*self.rows, 0, *self.weights)

    def __call__(
        self, subject: LinearAttention, batch: AttentionBatch, rows: Rows, weights: Weights
    ) -> torch.Tensor:
        """Run a forward: a replay, but an eager one where a prompt is in a graph without prompts."""
        if batch.num_prompts and not self.prompts:
            return eager(subject, batch, rows, weights)
        for target, source in zip(self.rows, rows, strict=True):
            target.fill_(1.0)
            target[: len(source)] = source
        for kept, given in zip(self.weights, weights, strict=True):
            kept.copy_(given)
        subject.plan_graph(batch, self.num_rows, prompts=self.prompts, drafts=True)
        self.graph.replay()
        self.replays += 1
        assert not self.out[batch.num_tokens :].any()
        return self.out[: len(rows[0])].clone()


@pytest.mark.parametrize("prompts", [False, True])
@torch.inference_mode()
def test_one_capture_serves_all_steps_with_drafts(prompts: bool) -> None:
    """Any numbers of rows and of accepted drafts, which the graph reads on the device."""
    for seed in range(3):
        captured = CapturedDrafts(SEQS * 9, prompts=prompts)
        steps = DraftSteps(
            *(TritonLinearAttention, SPEC, [40, 2, 25, 31, 9], 3),
            dtype=torch.bfloat16,
            device="cuda",
            seed=seed,
            forward=captured,
            tolerance=PROMPTS,
        )
        captured.capture(steps.subject)
        for pool in (steps.subject.states[0].conv, steps.subject.states[0].state):
            assert pool[1:].isnan().all(), "the capture wrote a slot of a sequence"
        steps.finish(np.random.default_rng(seed))
        assert captured.replays > 5
