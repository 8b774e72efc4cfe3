"""The check of `phalanx check --run`: right all-to-alls agree with the reference, and each kind of defect is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.all2all.base import AllToAll, ExpertInput
from kernels.interface.backend import BackendShape
from kernels.pending import Pending
from kernels.routing.expert_map import ContiguousMap
from tests.distributed import deep_ep_fake, test_all2all, test_deepep_hosts
from tests.distributed.rank_pool import GroupInfo, RankPool
from tests.distributed.test_all2all import HIDDEN, MAX_TOKENS, WIDTH, Case
from tests.distributed.test_deepep_hosts import CASE, RANKS, hosts
from workers.rank import exchange_check
from workers.rank.exchange_check import Measured

CPU = torch.device("cpu")


def shape_of(case: Case, **changes: Any) -> BackendShape:
    shape = BackendShape(
        device="cpu",
        dtype=case.dtype,
        num_ranks=len(case.tokens),
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=case.num_experts,
        top_k=case.top_k,
        max_num_tokens=MAX_TOKENS,
    )
    return replace(shape, **changes)


def checked(
    all2all: AllToAll, shape: BackendShape, rank: int, *, fp8: bool = False
) -> list[Measured]:
    place = ContiguousMap(shape.num_experts, shape.num_ranks), rank, CPU
    return exchange_check.check(all2all, shape, *place, fp8=fp8)


def run_right(rank: int, num_ranks: int, info: GroupInfo, name: str, case: Case) -> None:
    built = test_all2all._build(name, "reference", case, rank, num_ranks, info, CPU)
    backends, shared = built
    found = checked(backends.all2all, shape_of(case), rank)
    assert [one.num_tokens for one in found] == [1, 32, MAX_TOKENS]
    assert not any(one.wrong for one in found) and all(one.error < 1e-4 for one in found)
    assert all(min(one.dispatch_s, one.combine_s) > 0 for one in found)
    assert {one.layout for one in found} == {"contiguous"}
    if num_ranks > case.num_experts:  # the last rank has no expert, so it gets no rows
        assert len(backends.all2all.dispatch(*_nobody(case)).wait().offs_e) in (0, 1)
    backends.all2all.close()
    if shared is not None:
        shared.close()


def _nobody(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TD, ids_TK, weights_TK = test_all2all._draw(case, 0, 0)
    return x_TD, torch.full_like(ids_TK, -1), weights_TK


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("torch_dist", Case((1, 1))),
        ("shm", Case((1, 1), num_experts=7)),
        ("allgather", Case((1, 1, 1, 1), num_experts=3, top_k=2)),
    ],
)
def test_right_all_to_alls(rank_pool: RankPool, name: str, case: Case):
    rank_pool.run(run_right, len(case.tokens), name, case)


def run_deepep(rank: int, num_ranks: int, info: GroupInfo, fp8: bool) -> list[str]:
    deep_ep_fake.install(test_deepep_hosts.GPUS_PER_HOST)
    hidden = 256
    all2all = hosts(num_ranks, hidden, fp8=fp8)
    found = checked(all2all, shape_of(CASE, hidden_size=hidden), rank, fp8=fp8)
    assert not any(one.wrong for one in found), found
    all2all.close()
    return [one.layout for one in found]


@pytest.mark.parametrize("fp8", [False, True])
def test_both_modes_of_deepep(rank_pool: RankPool, fp8: bool):
    layouts = ["masked", "contiguous", "contiguous"]
    assert rank_pool.run(run_deepep, RANKS, fp8) == [layouts] * RANKS


class Broken(AllToAll):
    """`inner` with one defect."""

    name = "broken"

    def __init__(self, inner: Any, defect: str):
        self._inner, self._defect = inner, defect

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        if self._defect == "a row is lost" and len(x_TD) > 4:
            topk_idx_TK = topk_idx_TK.clone()
            topk_idx_TK[1] = -1
        if self._defect == "rows of two ids change places":
            topk_idx_TK = topk_idx_TK.roll(1, 1)
        return self._inner.dispatch(x_TD, topk_idx_TK, topk_weights_TK)  # type: ignore[no-any-return]

    def combine(self, y_RD: torch.Tensor, handle: Any) -> Pending[torch.Tensor]:
        if self._defect == "a row is not a number" and len(y_RD):
            y_RD = y_RD.clone()
            y_RD[0] = torch.nan
        out_TD = self._inner.combine(y_RD, handle).wait()
        if self._defect == "a row is missing":
            out_TD = out_TD[1:]
        if self._defect == "padding has a sum":
            out_TD[-1] = 1.0
        return Pending.ready(out_TD)


def run_broken(rank: int, num_ranks: int, info: GroupInfo, defect: str) -> list[str]:
    case = Case((1, 1))
    backends, _ = test_all2all._build("torch_dist", "reference", case, rank, num_ranks, info, CPU)
    found = checked(Broken(backends.all2all, defect), shape_of(case), rank)
    backends.all2all.close()
    return [one.wrong for one in found]


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        ("a row is lost", "expected are"),
        ("rows of two ids change places", "of its norm"),
        ("a row is not a number", "off by inf"),
        ("a row is missing", "sums have the shape"),
        ("padding has a sum", "of its norm"),
    ],
)
def test_defects(rank_pool: RankPool, defect: str, says: str):
    found = [wrong for of_rank in rank_pool.run(run_broken, 2, defect) for wrong in of_rank]
    assert any(says in wrong for wrong in found), found


def test_factors_of_neighbours_differ():
    factor_E = exchange_check.factors(256)
    assert factor_E.min() >= 0.5 and factor_E.max() < 1.5
    assert (factor_E.diff().abs() > 0.3).all() and len(set(factor_E.tolist())) == 256
