"""A layer of experts with a shared one in FP8: the norm before it writes its rows, no other kernel quantises them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.all2all.local import LocalAllToAll
from kernels.block_fp8 import BlockWeights, dequantise
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.routing.expert_load import ExpertLoad
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation
from tests.closeness import calc_diff
from tests.gdn_case import EPS, exact
from tests.triton.device import COMPILED
from tests.triton.test_gdn import quantised, rounded
from tests.unit.model_case import make_batch
from workers.layers import mlp, norm
from workers.layers.builder import LayerBuilder
from workers.layers.moe import MoeBlock
from workers.specs.model import MoeSpec, RouterSpec, SharedExpertSpec
from workers.weights.slots import BlockSlot, WeightSlot

__all__ = ["quantised"]  # a fixture
pytestmark = pytest.mark.skipif(COMPILED, reason="the experts are those of a CPU")
HIDDEN, WIDTH, EXPERTS = 256, 128, 4
ROWS = make_batch([[1], [2] * 4], [3, 0], padding=2)


def experts(*, gated: bool) -> MoeBlock:
    """A layer with random weights."""
    all2all = LocalAllToAll(
        Permutation(range(EXPERTS), num_experts=EXPERTS, device="cpu", dtype=torch.int64)
    )
    backends: Any = SimpleNamespace(
        all2all=all2all, grouped_gemm=ReferenceGroupedGemm(), expert_load=ExpertLoad()
    )
    builder = LayerBuilder(
        hidden_size=HIDDEN,
        norm_eps=EPS,
        backends=backends,
        expert_map=ContiguousMap(EXPERTS, 1),
        rank=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
        fp8=frozenset({"mlp.shared.gate_up.weight", "mlp.shared.down.weight"}),
    )
    spec = MoeSpec(
        num_experts=EXPERTS,
        intermediate_size=32,
        activation="silu",
        router=RouterSpec(top_k=2, norm_topk_prob=True),
        shared=SharedExpertSpec(intermediate_size=WIDTH, activation="silu", gated=gated),
    )
    block = MoeBlock(builder, spec, 0)
    assert block.shared is not None
    held = [block.shared.gate_up.weight, block.shared.down.weight, block.norm.weight]
    held += [block.router.weight, block.w13_e2ID, block.w2_eDI]
    if block.shared.gate is not None:
        held.append(block.shared.gate.weight)
    generator = torch.Generator().manual_seed(3)
    for parameter in held:
        drawn = torch.randn(parameter.shape, generator=generator) * HIDDEN**-0.5
        fp8 = isinstance(parameter, BlockWeights)
        (BlockSlot(parameter) if fp8 else WeightSlot.plain(parameter)).fill(drawn)
    block.norm.weight.add_(1.0)
    return block


def of_shared(block: MoeBlock, h_TD: torch.Tensor) -> torch.Tensor:
    """The output of the shared expert in torch, rows rounded once before each product."""
    shared = block.shared
    assert shared is not None
    held = (linear.weight for linear in (shared.gate_up, shared.down))
    gate_up_2ID, down_DI = (dequantise(it.values, it.scales) for it in held)
    gate_TI, up_TI = (exact(rounded(h_TD)) @ gate_up_2ID.t()).chunk(2, 1)
    out_TD = exact(rounded(F.silu(gate_TI) * up_TI)) @ down_DI.t()
    return out_TD if shared.gate is None else out_TD * (h_TD @ shared.gate.weight.t()).sigmoid()


@pytest.mark.parametrize("gated", [False, True])
@torch.inference_mode()
def test_rows_of_the_shared_expert_are_rounded_by_the_norm(
    quantised: list[torch.Size], monkeypatch: pytest.MonkeyPatch, gated: bool
) -> None:
    monkeypatch.setattr(mlp, "fused_kernels", norm.fused_kernels)
    block = experts(gated=gated)
    assert block.shared is not None and (block.shared.gate_of(3) is not None) == gated
    x_TD, delta_TD = torch.randn(
        2, len(ROWS.input_ids), HIDDEN, generator=torch.Generator().manual_seed(1)
    )
    sum_TD = x_TD + delta_TD
    h_TD = F.rms_norm(sum_TD, (HIDDEN,), block.norm.weight, EPS)
    residual_TD, routed_TD = block.forward(x_TD.clone(), delta_TD, ROWS)
    expected_TD = sum_TD + of_shared(block, h_TD)
    assert calc_diff(residual_TD, expected_TD) < 1e-6
    assert not quantised, "a kernel of its own quantised rows"
    # The routed experts take rows that nothing rounded.
    block.shared = None
    sum_again_TD, alone_TD = block.forward(x_TD.clone(), delta_TD, ROWS)
    assert torch.equal(sum_again_TD, sum_TD)
    torch.testing.assert_close(routed_TD, alone_TD, atol=1e-6, rtol=1e-6)
    assert routed_TD is not None and routed_TD[: ROWS.num_tokens].any()
