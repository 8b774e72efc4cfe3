"""Linear attention in CUDA graphs: one capture serves batches of any decodes, and padding touches no state."""

from collections.abc import Sequence

import pytest
import torch

from kernels.attention.batch import AttentionBatch
from kernels.linear_attention.base import LinearStates
from kernels.linear_attention.spec import LinearAttentionSpec
from kernels.linear_attention.triton_delta import TritonLinearAttention
from tests.linear_case import LinearCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SPEC = LinearAttentionSpec(4, 8, 128, 128, 4)
ROWS = 6


class Captured:
    """A graph of one layer for ROWS rows, over pools that each batch is copied into."""

    def __init__(self, num_slots: int):
        cuda = torch.device("cuda")
        self.subject = TritonLinearAttention([SPEC])
        self.states = self.subject.allocate([SPEC], num_slots, torch.bfloat16, cuda)
        self.subject.bind(self.states)
        self.subject.reserve_graphs(ROWS)
        heads = SPEC.num_value_heads
        self.rows = [
            torch.zeros(ROWS, width, dtype=torch.bfloat16, device=cuda)
            for width in (SPEC.channels, heads, heads)
        ]
        self.weights = [
            torch.zeros(SPEC.channels, SPEC.conv_width, dtype=torch.bfloat16, device=cuda),
            torch.zeros(heads, device=cuda),
            torch.zeros(heads, device=cuda),
        ]
        self.subject.plan_graph(AttentionBatch.dummy_decodes(ROWS, cuda), ROWS)
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
        self.subject.plan_graph(case.batch(), ROWS)
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
    captured = Captured(2 * ROWS + 2)
    assert not captured.out.any()
    for seed, contexts in enumerate([[5], [0, 9, 1], [3] * ROWS, [70, 0], [1, 2, 3, 4]]):
        seqs = [(context, 1) for context in contexts]
        padding = ROWS - len(seqs)
        case = LinearCase(
            [SPEC], seqs, padding=padding, dtype=torch.bfloat16, seed=seed, device="cuda"
        )
        case.check(0, captured.replay(case))
