"""The exchange `symm` among ranks whose memory lies in this one process; on GPUs see tests/gpu/test_all2all_cuda.py.

Ranks run one after the other, so nobody can wait for what comes later: the kernels' signals, assembly that the
interpreter does not know, are left out, and sums are sent by all ranks before they count.
"""

import pytest
import torch

from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.triton import push_rows, push_sums
from tests.triton.device import COMPILED
from tests.triton.symm_ranks import build_ranks

pytestmark = pytest.mark.skipif(COMPILED, reason="the interpreter's part; GPUs run the whole")

NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 7, 3, 24, 37
# A rounding of each answer and of each rank's sum; the interpreter cuts bfloat16 off.
ERRORS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 6e-2}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (push_rows, push_sums):
        monkeypatch.setattr(module, "signal_ranks", lambda *_: None)
        monkeypatch.setattr(module, "wait_for_ranks", lambda *_: None)


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
    row_format = RowFormat(HIDDEN, TOP_K, dtype)
    ranks = build_ranks(num_ranks, NUM_EXPERTS, row_format, MAX_TOKENS)
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
