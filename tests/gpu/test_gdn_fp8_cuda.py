"""A delta net with q, k, v, gate and output in FP8 on a GPU, against float32 on the CPU; eager and as a graph."""

import pytest
import torch

from kernels import dense_fp8
from kernels.backends.select import probe
from kernels.block_fp8 import BlockWeights, quantise_groups
from tests.closeness import calc_diff
from tests.gdn_case import HIDDEN, Reference, gdn, moved
from tests.unit.model_case import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = [  # prompts of many rows, prompts beside decodes, decodes
    make_batch([[0] * 3, [0] * 40], [0, 0], padding=2),
    make_batch([[0], [0] * 20], [3, 40], padding=3),
    make_batch([[0], [0]], [4, 60], padding=1),
]


@pytest.fixture(autouse=True, scope="module")
def deep_gemm() -> None:
    if reason := probe("cuda").get("grouped_gemm.deepgemm_fp8"):
        pytest.skip(reason)


def draw(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(2, num_rows, HIDDEN, generator=generator).bfloat16()


@torch.inference_mode()
def test_outputs_equal_those_of_the_cpu() -> None:
    """States and rows of convolutions pass from step to step."""
    block = gdn("triton", "cuda", torch.bfloat16)
    reference = Reference(block, quantise_groups)
    for batch in STEPS:
        x_TD, delta_TD = draw(len(batch.input_ids))
        sum_TD = (x_TD.float() + delta_TD.float()).bfloat16()
        block.linear_attention.plan(moved(batch, "cuda"))
        residual_TD, out = block.forward(x_TD.cuda(), delta_TD.cuda(), x_TD)
        assert torch.equal(residual_TD.cpu(), sum_TD) and out is not None
        found_TD = out.float().sum(0) if out.dim() == 3 else out.float()
        expected_TD = reference.forward(sum_TD.float(), batch)
        real = slice(0, batch.num_tokens)
        assert calc_diff(found_TD.cpu()[real], expected_TD[real]) < 3e-3, batch.num_tokens


@torch.inference_mode()
def test_decodes_replay_as_a_graph() -> None:
    block = gdn("triton", "cuda", torch.bfloat16)
    attention, batch = block.linear_attention, moved(STEPS[2], "cuda")
    weights = [block.qkvz.weight, block.out.weight]
    assert all(isinstance(held, BlockWeights) for held in weights)
    dense_fp8.compile_products(weights, [3], 0, 1)
    x_TD, delta_TD = draw(3).cuda()
    attention.reserve_graphs(4, 4)

    def run() -> torch.Tensor:
        out = block.forward(x_TD.clone(), delta_TD, x_TD)[1]
        assert out is not None
        return out

    def reset() -> None:
        for states in attention.states:
            states.conv.zero_()
            states.state.fill_(0.01)

    reset()
    attention.plan(batch)
    expected = run()
    reset()
    attention.plan_graph(batch, 3, prompts=False)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    reset()
    graph.replay()
    assert torch.equal(found[..., :2, :], expected[..., :2, :])
