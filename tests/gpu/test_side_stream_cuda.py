"""Layers of experts in CUDA graphs, the shared expert beside the routed ones: equal to layers without graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all.local import LocalAllToAll
from kernels.backends import side_stream
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.routing.expert_load import ExpertLoad
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation
from tests.devices import take_gpu
from tests.unit.test_side_stream import weights_of
from workers.layers.builder import LayerBuilder
from workers.layers.moe import MoeBlock
from workers.specs.model import MoeSpec, RouterSpec, SharedExpertSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EXPERTS, HIDDEN, WIDTH, LAYERS, REPLAYS = 64, 2048, 512, 6, 50


def layers(device: torch.device) -> list[MoeBlock]:
    """Layers with random weights in bfloat16, on one rank."""
    permutation = Permutation(range(EXPERTS), num_experts=EXPERTS, device=device, dtype=torch.int64)
    backends: Any = SimpleNamespace(
        all2all=LocalAllToAll(permutation),
        grouped_gemm=TritonGroupedGemm(),
        expert_load=ExpertLoad(),
    )
    builder = LayerBuilder(
        hidden_size=HIDDEN,
        norm_eps=1e-6,
        backends=backends,
        expert_map=ContiguousMap(EXPERTS, 1),
        rank=0,
        device=device,
        dtype=torch.bfloat16,
    )
    spec = MoeSpec(
        num_experts=EXPERTS,
        intermediate_size=WIDTH,
        activation="silu",
        router=RouterSpec(top_k=8, norm_topk_prob=True),
        shared=SharedExpertSpec(intermediate_size=WIDTH, activation="silu", gated=True),
    )
    blocks = [MoeBlock(builder, spec, layer) for layer in range(LAYERS)]
    for block in blocks:
        for weights in weights_of(block):
            weights.normal_(0, HIDDEN**-0.5)
        block.norm.weight.add_(1)
    return blocks


@pytest.mark.parametrize("num_rows", [1, 4, 32, 96, 512])
@torch.inference_mode()
def test_graphs_equal_layers_without_graphs(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    take_gpu(0)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    blocks, forks = layers(device), []
    choose = side_stream._side_stream

    def noted(*args: Any) -> Any:
        forks.append(choose(*args))
        return forks[-1]

    monkeypatch.setattr(side_stream, "_side_stream", noted)
    batch: Any = SimpleNamespace(adapters=None, num_token_non_padded=num_rows, spread_copies=False)

    def forward(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        residual_TD, hidden_TD = x_TD.clone(), None
        for block in blocks:
            residual_TD, hidden_TD = block.forward(residual_TD, hidden_TD, batch)
        return residual_TD, hidden_TD

    x_TD = torch.randn(num_rows, HIDDEN, device=device, dtype=torch.bfloat16)
    forward(x_TD)
    assert forks == [None] * LAYERS
    forks.clear()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = forward(x_TD)
    assert len(forks) == LAYERS and None not in forks
    for _ in range(REPLAYS):
        x_TD.normal_()
        graph.replay()
        for one, other in zip(found, forward(x_TD), strict=True):
            assert one is not None and other is not None and torch.equal(one, other)
