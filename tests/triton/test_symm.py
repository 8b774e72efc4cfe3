"""The exchange `symm` among ranks whose memory lies in this one process; on GPUs see tests/gpu/test_all2all_cuda.py.

Ranks run one after the other, so nobody can wait for what comes later: the kernels' signals, assembly that the
interpreter does not know, are left out, and sums are sent by all ranks before they count.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all import symm
from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.all2all.peer_memory import HEADER_BYTES
from kernels.all2all.symm import SymmAllToAll
from kernels.device_routing import DeviceRouting, route_on_device
from kernels.permute import ExpertOrder
from kernels.placement import ExpertPlacement
from kernels.triton import push_rows, push_sums
from tests.triton.device import COMPILED

pytestmark = pytest.mark.skipif(COMPILED, reason="the interpreter's part; GPUs run the whole")

NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 7, 3, 24, 37
# A rounding of each answer and of each rank's sum; the interpreter cuts bfloat16 off.
ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 6e-2}


class Memory:
    """As PeerMemory, of ordinary memory; `group.memories` has that of all ranks once they are built."""

    def __init__(self, group: SimpleNamespace, device: torch.device, num_bytes: int):
        self._all = group.memories
        # Bytes that make NaN: what nobody wrote must not count.
        self.local = torch.full((HEADER_BYTES + num_bytes,), 255, dtype=torch.uint8)
        self.local[:HEADER_BYTES] = 0
        self._all.append(self.local)

    @property
    def bases_r(self) -> torch.Tensor:
        return torch.tensor([memory.data_ptr() for memory in self._all])


class DeviceOrder(ExpertOrder):
    """Routes as on a GPU."""

    def route(self, topk_idx_NK: torch.Tensor) -> DeviceRouting:
        return route_on_device(topk_idx_NK, self.experts, num_experts=NUM_EXPERTS)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (push_rows, push_sums):
        monkeypatch.setattr(module, "signal_ranks", lambda *_: None)
        monkeypatch.setattr(module, "wait_for_ranks", lambda *_: None)
    monkeypatch.setattr(symm, "PeerMemory", Memory)
    device = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)


def build(num_ranks: int, dtype: torch.dtype) -> list[SymmAllToAll]:
    placement, memories = ExpertPlacement(NUM_EXPERTS, num_ranks), []
    row_format, cpu = RowFormat(HIDDEN, TOP_K, dtype), torch.device("cpu")
    ranks = []
    for rank in range(num_ranks):
        group: Any = SimpleNamespace(
            rank=partial(int, rank), size=partial(int, num_ranks), memories=memories
        )
        order = DeviceOrder(placement.local_experts(rank), num_experts=NUM_EXPERTS, device=cpu)
        ranks.append(SymmAllToAll(group, placement, order, row_format, cpu, MAX_TOKENS))
    return ranks


def draw(num_tokens: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, topk_idx with some of -1, topk_weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    ids = scores.topk(TOP_K).indices
    ids[1::4, 0] = -1
    ids[3::4] = -1
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    return x, ids, torch.rand(num_tokens, TOP_K, generator=generator)


def answer(routed: ExpertInput, experts: range) -> torch.Tensor:
    """Expert e gives (e + 1) * x; what lies at nobody's places is NaN."""
    y_RD = torch.full_like(routed.in_order(), float("nan"))
    x_RD, routing = routed.in_order(), routed.places()
    for expert, start, end in zip(experts, routing.starts_e, routing.ends_e, strict=True):
        y_RD[start:end] = x_RD[start:end] * (expert + 1)
    return y_RD


@pytest.mark.parametrize(
    ("num_ranks", "num_sms", "dtype"),
    [
        (1, None, torch.float32),
        (2, 1, torch.float16),
        (3, None, torch.float32),
        (3, 2, torch.bfloat16),
        (8, 2, torch.float32),  # one of them without experts
    ],
)
def test_rows_go_to_their_experts_and_back(one_process, num_ranks, num_sms, dtype):
    ranks = build(num_ranks, dtype)
    for call, num_tokens in enumerate((4, 0, MAX_TOKENS, 1)):
        inputs = [draw(num_tokens, 10 * call + rank, dtype) for rank in range(num_ranks)]
        for exchange in ranks:
            exchange.set_num_sms(num_sms)
        arrivals = [exchange.dispatch(*own) for exchange, own in zip(ranks, inputs, strict=True)]
        routed = [arrival.wait() for arrival in arrivals]
        experts = [exchange._order.experts for exchange in ranks]
        answers = [answer(*each) for each in zip(routed, experts, strict=True)]
        for _ in range(2):  # with the second one all ranks' sums are there
            sums = [
                exchange.combine(y_RD, its.handle).wait()
                for exchange, y_RD, its in zip(ranks, answers, routed, strict=True)
            ]
        for (x, ids, weights), found in zip(inputs, sums, strict=True):
            factor = (weights * (ids + 1)).sum(1, keepdim=True)  # an id of -1 adds nothing
            expected = x.float() * factor
            torch.testing.assert_close(
                found.float(), expected, atol=ERRORS[dtype], rtol=ERRORS[dtype]
            )
