"""Experts by a law: the kernel gives exactly what the CPU's operators give."""

import pytest
import torch

from kernels.routing.forced_routing import ForcedRouting, noise_table
from kernels.triton.forced_route import forced_route
from tests.triton.device import DEVICE, compiled_only

LAYER = 47


def tokens(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, 151_936, (num_tokens,), generator=generator)
    return ids, torch.randint(0, 40_960, (num_tokens,), generator=generator)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4), (7, 3), (1, 1)])
@pytest.mark.parametrize("num_rows", [0, 1, 7, *compiled_only(300, 8192)])
@pytest.mark.parametrize(("law", "exponent"), [("uniform", 1.0), ("zipf", 1.2), ("balanced", 1.0)])
def test_equals_the_cpu(law, exponent, num_rows, num_experts, top_k, on_device):
    ids, positions = tokens(num_rows)
    num_tokens = num_rows - num_rows // 5
    shape = {"num_experts": num_experts, "top_k": top_k, "rank": 1, "num_ranks": 4}
    route = ForcedRouting(law, exponent, **shape, device="cpu", layer=LAYER)
    expected = route(ids, positions, num_tokens)
    found = forced_route(
        ids.to(DEVICE),
        positions.to(DEVICE),
        route._table_E.to(DEVICE),
        noise_table(torch.device(DEVICE)),
        in_turn=law == "balanced",
        layer=LAYER,
        top_k=top_k,
        num_tokens=torch.tensor([num_tokens], device=DEVICE) if on_device else num_tokens,
    )
    for tensor, wanted in zip(found, expected, strict=True):
        assert tensor.dtype == wanted.dtype and torch.equal(tensor.cpu(), wanted)
