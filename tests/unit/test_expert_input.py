"""Inputs of experts: the adapters of rows that stay on their rank, and rows before they were quantised."""

import torch

from kernels.all2all.base import ExpertInput
from kernels.all2all.local import LocalAllToAll
from kernels.block_fp8 import quantise_groups
from kernels.routing.permute import Permutation


def test_rows_that_stay_get_the_slots_of_their_adapters_behind_the_dispatch() -> None:
    """Ids have no column of adapters; each row of a CPU says which row it was."""
    exchange = LocalAllToAll(Permutation(range(4), num_experts=4, device="cpu", dtype=torch.int64))
    assert not exchange.moves_rows and exchange.slot_column is None
    x_TD = torch.arange(3.0).unsqueeze(1).expand(3, 8).contiguous()
    ids_TK = torch.tensor([[3, 0], [1, 3], [-1, -1]])
    routed = exchange.dispatch(x_TD, ids_TK, torch.ones(3, 2)).wait()
    slots_N = routed.with_slots(torch.tensor([7, 0, 5])).slots_N
    assert routed.x_RD[:, 0].tolist() == [0, 1, 0, 1]
    assert slots_N is not None and slots_N.tolist() == [7, 0, 7, 0]


def test_gathered_rows_keep_their_slots_in_order() -> None:
    slots_T = torch.tensor([2, 0, 1])
    gathered = ExpertInput(torch.zeros(3, 8), torch.zeros(4, dtype=torch.int32), None)
    assert gathered.with_slots(slots_T).slots_N is slots_T


def test_adapters_read_rows_as_they_were_before_this_rank_quantised_them() -> None:
    x_ND = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = quantise_groups(x_ND)
    offs_e = torch.zeros(4, dtype=torch.int32)
    received = ExpertInput(rows.values, offs_e, None, scale_RS=rows.scales)
    assert received.wide_rows().dtype == torch.bfloat16
    assert not torch.equal(received.wide_rows(), x_ND)
    own = ExpertInput(rows.values, offs_e, None, scale_RS=rows.scales, wide_RD=x_ND)
    assert own.wide_rows() is x_ND
