"""Experts by a law on a GPU: without waiting for the device, and in a graph."""

import pytest
import torch

from kernels.routing.forced_routing import ForcedRouting
from tests.triton.test_forced_route import tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAWS = [("uniform", 1.0), ("zipf", 1.2), ("balanced", 1.0)]


def law(name: str, exponent: float, device: str) -> ForcedRouting:
    values = {"num_experts": 128, "top_k": 8, "rank": 1, "num_ranks": 4, "layer": 47}
    return ForcedRouting(name, exponent, **values, device=device)


@pytest.mark.parametrize(("name", "exponent"), LAWS)
def test_captures_into_a_graph(name, exponent):
    route = law(name, exponent, "cuda")
    ids, positions = (tensor.cuda() for tensor in tokens(256))
    count = torch.tensor([256], device="cuda")
    route(ids, positions, count)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        route(ids, positions, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = route(ids, positions, count)
    for num_tokens in (256, 100, 0):
        ids.add_(1)
        count.fill_(num_tokens)
        graph.replay()
        expected = law(name, exponent, "cpu")(ids.cpu(), positions.cpu(), num_tokens)
        assert torch.equal(found[0].cpu(), expected[0])
