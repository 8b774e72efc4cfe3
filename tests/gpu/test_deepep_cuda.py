"""The DeepEP exchanges on GPUs: what arrives, what comes back, graphs, SMs, two instances.

Thresholds are those of DeepEP's own tests: a difference of 5e-6 for sums in bfloat16, 9e-4 in FP8.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.all2all.comm_stream import CommStream
from kernels.all2all.payload import quantise
from kernels.backends import select
from tests.closeness import calc_diff
from tests.distributed.rank_pool import GroupInfo, RankPool
from tests.distributed.test_deepep import MaskedReference
from tests.gpu.deepep_case import EQUAL, UNEVEN, Case, Layer, in_graph

SUMS, FP8_SUMS = 5e-5, 3e-3  # of products that are themselves rounded
NORMAL = [("deepgemm", SUMS), ("deepgemm_fp8", FP8_SUMS)]


def _why_not() -> str | None:
    if torch.cuda.device_count() < 2:
        return f"needs 2 GPUs, found {torch.cuda.device_count()}"
    return select.probe("cuda").get("all2all.deepep")


def _why_not_low_latency() -> str | None:
    return _why_not() or select.probe("cuda").get("all2all.deepep_low_latency")


normal_mode = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
low_latency = pytest.mark.skipif(
    _why_not_low_latency() is not None, reason=str(_why_not_low_latency())
)
pytestmark = [pytest.mark.gpu]


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def run(pool: RankPool, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return pool.run(fn, 2, *args, backend="nccl", timeout_s=150)


@torch.inference_mode()
def contract(
    rank: int,
    num_ranks: int,
    info: GroupInfo,
    name: str,
    gemm: str,
    labels: list[str],
    most: float = SUMS,
):
    """One at a time, then three under way; then an own stream."""
    for label in labels:
        case = (EQUAL | UNEVEN)[label]
        product = MaskedReference() if gemm == "reference" else None
        layer = Layer(name, "deepgemm" if product else gemm, case, rank, product)
        try:
            for stream in (None, CommStream()):
                layer.all2all.stream = stream
                layer.check(0, layer(*case.draw(rank, 0)), most)
                sent = [layer.all2all.dispatch(*case.draw(rank, slot)) for slot in range(3)]
                routed = [pending.wait() for pending in sent]
                back = [
                    layer.all2all.combine(layer.gemm(rows, *layer.prepared), rows.handle)
                    for rows in routed
                ]
                for slot, pending in enumerate(back):
                    layer.check(slot, pending.wait(), most)
        except Exception as error:
            raise AssertionError(f"case {label}") from error
        finally:
            layer.all2all.close()


@normal_mode
@pytest.mark.parametrize(("gemm", "most"), [*NORMAL, ("triton", SUMS)])
def test_normal_contract(pool: RankPool, gemm: str, most: float):
    if gemm != "triton":
        pytest.importorskip("deep_gemm")
    run(pool, contract, "deepep", gemm, list(EQUAL), most)


@low_latency
def test_low_latency_contract(pool: RankPool):
    run(pool, contract, "deepep_low_latency", "reference", [*EQUAL, *UNEVEN])


@torch.inference_mode()
def received(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """Which rows arrive, in which order, and that the room behind them reaches no expert."""
    for label in ("many", "padding", "idle_rank", "one_expert_takes_all"):
        case = EQUAL[label]
        layer = Layer("deepep", "triton", case, rank)
        routed = layer.all2all.dispatch(*case.draw(rank, 3)).wait()
        local, parts = case.num_experts // 2, []
        for source in range(2):
            x_TD, ids_TK, weights_TK = case.draw(source, 3)
            own_TK = ids_TK - rank * local
            own_TK = own_TK.where((own_TK >= 0) & (own_TK < local), -1)
            here = (own_TK >= 0).any(1)
            parts.append((x_TD[here], own_TK[here], weights_TK.where(own_TK >= 0, 0)[here]))
        x_ND, ids_NK, weights_NK = (torch.cat(part) for part in zip(*parts, strict=True))
        count = len(x_ND)
        assert len(routed.x_RD) == 2 * case.tokens[0] >= count
        assert torch.equal(routed.x_RD[:count], x_ND)
        assert torch.equal(routed.handle.topk_weights_NK[:count], weights_NK)
        permuted_idx_NK = routed.routing.permuted_idx_NK
        assert (
            torch.equal(permuted_idx_NK[:count] >= 0, ids_NK >= 0)
            and (permuted_idx_NK[count:] == -1).all()
        )
        per_expert = torch.bincount(ids_NK[ids_NK >= 0], minlength=local)
        assert routed.offs_e.tolist() == per_expert.cumsum(0).tolist()
        layer.all2all.close()


@normal_mode
def test_rows_arrive_by_source_then_token(pool: RankPool):
    run(pool, received)


@torch.inference_mode()
def received_in_fp8(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """Values and scales are those of rounding before the dispatch, bit by bit."""
    for label in ("many", "padding", "one_expert_takes_all"):
        case = EQUAL[label]
        layer = Layer("deepep", "deepgemm_fp8", case, rank)
        routed = layer.all2all.dispatch(*case.draw(rank, 3)).wait()
        local, parts = case.num_experts // 2, []
        for source in range(2):
            x_TD, ids_TK, _ = case.draw(source, 3)
            values_TD, scales_TS = quantise(x_TD)
            here = (ids_TK // local == rank).any(1)
            parts.append((values_TD.view(torch.uint8)[here], scales_TS[here]))
        values_ND, scales_NS = (torch.cat(part) for part in zip(*parts, strict=True))
        assert routed.x_RD.dtype == torch.float8_e4m3fn and routed.scale_RS is not None
        assert torch.equal(routed.x_RD.view(torch.uint8)[: len(values_ND)], values_ND)
        assert torch.equal(routed.scale_RS[: len(values_ND)], scales_NS)
        layer.all2all.close()


@normal_mode
def test_rows_arrive_in_fp8(pool: RankPool):
    pytest.importorskip("deep_gemm")
    run(pool, received_in_fp8)


@torch.inference_mode()
def sums(rank: int, num_ranks: int, info: GroupInfo) -> None:
    """Experts that give back their rows: combine is a row times the weights it has, rounded per rank."""
    case = EQUAL["many"]
    layer = Layer("deepep", "triton", case, rank)
    x_TD, ids_TK, _ = case.draw(rank, 5)
    ones_TK = torch.ones(ids_TK.shape, device="cuda") / 8
    outs = []
    for num_sms in (None, 4, 8, 16, 20, 24, 32):
        layer.all2all.set_num_sms(num_sms)
        routed = layer.all2all.dispatch(x_TD, ids_TK, ones_TK).wait()
        back = layer.all2all.combine(routed.permuted_rows(), routed.handle)
        outs.append(back.wait())
        assert calc_diff(outs[-1], x_TD) < 5e-6
    assert all(torch.equal(out, outs[0]) for out in outs)
    layer.all2all.close()


@normal_mode
def test_sums_for_any_number_of_sms(pool: RankPool):
    run(pool, sums)


@torch.inference_mode()
def replays(rank: int, num_ranks: int, info: GroupInfo, name: str, gemm: str, rounds: int) -> None:
    """A graph of two layers gives what eager does, bit by bit, for any inputs; eager runs in between."""
    for stream in (None, CommStream()):
        case = Case((96, 96), "padding", num_experts=32, top_k=8)
        layer = Layer(name, gemm, case, rank)
        layer.all2all.stream = stream
        inputs = case.draw(rank, 0)

        def both(layer=layer, inputs=inputs) -> torch.Tensor:
            x_TD, *routing = inputs
            return layer(layer(x_TD, *routing), *routing)

        eager_TD = both()
        graph, out_TD = in_graph(both)
        for slot in range(rounds):
            for held, drawn in zip(inputs, case.draw(rank, slot % 7), strict=True):
                held.copy_(drawn)
            out_TD.zero_()
            graph.replay()
            if slot % 7 == 0:
                assert torch.equal(out_TD, eager_TD), slot
            elif slot % 5 == 0:
                assert torch.equal(both(), out_TD), slot
        graph.reset()
        layer.all2all.close()


@normal_mode
@pytest.mark.parametrize(
    ("gemm", "rounds"), [("triton", 500), ("deepgemm", 50), ("deepgemm_fp8", 50)]
)
def test_normal_graphs(pool: RankPool, gemm: str, rounds: int):
    if gemm != "triton":
        pytest.importorskip("deep_gemm")
    run(pool, replays, "deepep", gemm, rounds)


@low_latency
@pytest.mark.parametrize("gemm", ["deepgemm", "deepgemm_fp8"])
def test_low_latency_graphs(pool: RankPool, gemm: str):
    pytest.importorskip("deep_gemm")
    run(pool, replays, "deepep_low_latency", gemm, 200)


@torch.inference_mode()
def two_ubatches(
    rank: int, num_ranks: int, info: GroupInfo, name: str, gemm: str, most: float
) -> None:
    """Two instances whose exchanges cross each other on a stream of their own, eagerly and in a graph."""
    case = EQUAL["even"]
    layers = [Layer(name, gemm, case, rank) for _ in range(2)]
    stream = CommStream()
    drawn = [case.draw(rank, slot) for slot in range(2)]
    for layer in layers:
        layer.all2all.stream = stream

    def step() -> torch.Tensor:
        pairs = list(zip(layers, drawn, strict=True))
        sent = [layer.all2all.dispatch(*inputs) for layer, inputs in pairs]
        back = []
        for layer, pending in zip(layers, sent, strict=True):
            routed = pending.wait()
            y = layer.gemm(routed, *layer.prepared)
            back.append(layer.all2all.combine(y, routed.handle))
        return torch.stack([pending.wait() for pending in back])

    for _ in range(50):
        out_sTD = step()
    for slot, layer in enumerate(layers):
        layer.check(slot, out_sTD[slot], most)
    graph, replayed_sTD = in_graph(step)
    for _ in range(20):
        graph.replay()
    assert torch.equal(replayed_sTD, out_sTD)
    graph.reset()
    for layer in layers:
        layer.all2all.close()


@normal_mode
@pytest.mark.parametrize(("gemm", "most"), [*NORMAL, ("triton", SUMS)])
def test_two_ubatches(pool: RankPool, gemm: str, most: float):
    if gemm != "triton":
        pytest.importorskip("deep_gemm")
    run(pool, two_ubatches, "deepep", gemm, most)


@low_latency
@pytest.mark.parametrize(("gemm", "most"), [("deepgemm", SUMS), ("deepgemm_fp8", FP8_SUMS)])
def test_two_ubatches_of_low_latency(pool: RankPool, gemm: str, most: float):
    pytest.importorskip("deep_gemm")
    run(pool, two_ubatches, "deepep_low_latency", gemm, most)


@torch.inference_mode()
def low_latency_sums(rank: int, num_ranks: int, info: GroupInfo, use_fp8: bool) -> None:
    """Exact counts for random routing with holes; rows come back summed with their weights, always the same."""
    gemm = "deepgemm_fp8" if use_fp8 else "deepgemm"
    case = Case((255, 121), "padding", num_experts=128, top_k=8)
    layer = Layer("deepep_low_latency", gemm, case, rank)
    everybodys = [case.draw(source, 9) for source in range(2)]
    ids_P = torch.cat([ids.flatten() for _, ids, _ in everybodys])
    counts_E = torch.bincount(ids_P[ids_P >= 0], minlength=128)
    x_TD, ids_TK, weights_TK = everybodys[rank]
    outs = []
    for _ in range(20):
        masked = layer.all2all.dispatch(x_TD, ids_TK, weights_TK).wait()
        assert masked.counts_e.tolist() == counts_E[rank * 64 : rank * 64 + 64].tolist()
        rows_eMD = masked.x_eMD
        if use_fp8:
            rows_eMD = rows_eMD.float() * masked.scale_eMS.repeat_interleave(128, 2)
        back = layer.all2all.combine(rows_eMD.bfloat16().contiguous(), masked.handle)
        outs.append(back.wait())
    expected_TD = x_TD.float() * (weights_TK * (ids_TK >= 0)).sum(1, keepdim=True)
    assert not outs[0].isnan().any()
    assert calc_diff(outs[0], expected_TD) < (9e-4 if use_fp8 else SUMS)
    assert all(torch.equal(out, outs[0]) for out in outs)
    layer.all2all.close()


@low_latency
@pytest.mark.parametrize("use_fp8", [False, True])
def test_low_latency_sums(pool: RankPool, use_fp8: bool):
    pytest.importorskip("deep_gemm")
    run(pool, low_latency_sums, use_fp8)


@torch.inference_mode()
def random_rounds(rank: int, num_ranks: int, info: GroupInfo, name: str, gemm: str) -> None:
    """A thousand exchanges of changing sizes, checked at the end by the last and by those in between."""
    product = MaskedReference() if gemm == "reference" else None
    cases = [Case((count, count), "padding") for count in (1, 3, 64, 200)]
    layer = Layer(name, "deepgemm" if product else gemm, cases[0], rank, product)
    order = torch.randint(4, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = [case.draw(rank, 0) for case in cases]
    identity = [drawn[which][0].clone() for which in range(4)]
    for number, which in enumerate(order):
        x_TD, ids_TK, weights_TK = drawn[which]
        routed = layer.all2all.dispatch(x_TD, ids_TK, weights_TK).wait()
        rows = routed.x_eMD if name.endswith("latency") else routed.permuted_rows()
        out_TD = layer.all2all.combine(rows, routed.handle).wait()
        if number % 100 == 99:
            expected_TD = identity[which].float() * (weights_TK * (ids_TK >= 0)).sum(
                1, keepdim=True
            )
            assert calc_diff(out_TD, expected_TD) < SUMS, number
    layer.all2all.close()


@normal_mode
def test_normal_rounds(pool: RankPool):
    run(pool, random_rounds, "deepep", "triton")


@low_latency
def test_low_latency_rounds(pool: RankPool):
    run(pool, random_rounds, "deepep_low_latency", "reference")
