"""Alternating ubatches over real all-to-alls: equal numbers, the promised order, and hidden communication."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from tests.distributed.rank_pool import RankPool
from tests.distributed.ubatch_ranks import (
    STEPS,
    Clock,
    UbatchRank,
    batch_of,
    followed,
    rows_of,
    slowed,
)
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous

EXCHANGES = [
    (ranks, name)
    for ranks in (1, 2, 3, 4)
    for name in (("local",) if ranks == 1 else ("torch_dist", "allgather", "shm"))
]
# Seconds. A layer of the delayed forwards computes 2 * COMPUTE a ubatch and exchanges twice.
LAYERS, COMPUTE, DELAY = 2, 0.1, 0.09


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ubatch") / "model"
    return make_checkpoint(
        path, num_layers=LAYERS, hidden_size=64, num_experts=10, head_dim=32, vocab_size=300
    )


def on_ranks(pool: RankPool, function, config: RankConfig, *args) -> list:
    """`function(UbatchRank, *args)` on every rank."""
    with local_rendezvous() as rendezvous:
        arguments = (config.num_ranks, _on_rank, config, rendezvous, function, args)
        return pool.run(_call, *arguments, with_group=False)


def _call(rank: int, num_ranks: int, info, on_rank, *args):
    return on_rank(rank, *args)


def _on_rank(rank: int, config: RankConfig, rendezvous: Rendezvous, function, args):
    num_ubatches, *rest = args
    ubatch_rank = UbatchRank(rank, config, rendezvous, num_ubatches)
    try:
        return function(ubatch_rank, rank, config.num_ranks, num_ubatches, *rest)
    finally:
        ubatch_rank.close()


def config_of(checkpoint: Path, num_ranks: int, all2all: str, **kernels: str) -> RankConfig:
    from tests.unit.model_case import BLOCK_SIZE

    return rank_config(
        checkpoint,
        num_ranks,
        kernels={"all2all": all2all, **kernels},
        cache={"block_size": BLOCK_SIZE},
    )


def differences(ubatch_rank: UbatchRank, rank: int, num_ranks: int, num_ubatches: int):
    """Of each step: (largest difference to one whole forward, equal to the ubatches one after another)."""
    found = {}
    for name in STEPS:
        batch = batch_of(name, rank, rows_of(name, num_ranks, num_ubatches))
        real = slice(batch.num_tokens)
        plain_TD, ubatches_TD = (
            ubatch_rank.plain(batch)[real],
            ubatch_rank.one_after_another(batch)[real],
        )
        hidden_TD = ubatch_rank.ubatched(batch)[real]
        worst = float((plain_TD - hidden_TD).abs().max()) if batch.num_tokens else 0.0
        found[name] = worst, torch.equal(ubatches_TD, hidden_TD)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "all2all", "num_ubatches"),
    [  # two or three ubatches in turn; both everywhere is exhaustive
        pytest.param(*exchange, count, marks=[] if number % 2 == turn else pytest.mark.exhaustive)
        for number, exchange in enumerate(EXCHANGES)
        for turn, count in enumerate((2, 3))
    ],
)
def test_ubatches_compute_what_a_whole_step_does(
    rank_pool, checkpoint, num_ranks, all2all, num_ubatches
):
    config = config_of(checkpoint, num_ranks, all2all)
    for found in on_ranks(rank_pool, differences, config, num_ubatches):
        for name, (worst, same_as_in_turn) in found.items():
            assert same_as_in_turn, f"{name}: alternating changes the numbers"
            assert worst < 2e-5, f"{name}: cutting changes the numbers by {worst}"
            # What a cut changes is rounding: matrix products of other shapes add in another order.


def orders(ubatch_rank: UbatchRank, rank: int, num_ranks: int, num_ubatches: int):
    """Events of a ubatched step and of a plain one, in order."""
    ubatched, plain = [], []
    ubatches = [followed(one, i, ubatched) for i, one in enumerate(ubatch_rank.ubatches)]
    batch = batch_of("mixed", rank, rows_of("mixed", num_ranks, num_ubatches))
    ubatch_rank.ubatched(batch, ubatches)
    ubatch_rank.plain(batch, followed(ubatch_rank.whole, 0, plain))
    return ubatched, plain


@pytest.mark.parametrize(
    ("num_ranks", "all2all", "num_ubatches"),
    [
        *((2, "torch_dist", 4), (3, "allgather", 2), (2, "shm", 4)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((2, "torch_dist", 2), (3, "allgather", 4), (2, "shm", 2))
        ),
    ],
)
def test_the_order_of_operations(rank_pool, checkpoint, num_ranks, all2all, num_ubatches):
    config = config_of(checkpoint, num_ranks, all2all)
    for ubatched, plain in on_ranks(rank_pool, orders, config, num_ubatches):
        one_layer = [(x, i) for x in ("dispatch", "combine") for i in range(num_ubatches)]
        assert [event[1:] for event in ubatched if event[0] == "called"] == one_layer * LAYERS
        one_after_another = [
            (event, x, 0) for x in ("dispatch", "combine") for event in ("called", "arrived")
        ]
        assert plain == one_after_another * LAYERS
        # The next ubatch computes up to its call while the all-to-all of a ubatch is in flight.
        for operation in ("dispatch", "combine"):
            for index in range(num_ubatches - 1):
                calls, next_calls, arrivals = (
                    [at for at, event in enumerate(ubatched) if event == wanted]
                    for wanted in (
                        ("called", operation, index),
                        ("called", operation, index + 1),
                        ("arrived", operation, index),
                    )
                )
                assert len(calls) == LAYERS
                for call, next_call, arrival in zip(calls, next_calls, arrivals, strict=True):
                    assert call < next_call < arrival, ubatched


def timings(ubatch_rank: UbatchRank, rank: int, num_ranks: int, num_ubatches: int):
    """Seconds of a plain forward with delay, and of ubatched forwards without and with delay."""
    batch = batch_of("extend", rank, rows_of("extend", num_ranks, num_ubatches))
    clock = Clock()
    whole = slowed(ubatch_rank.whole, clock, compute=num_ubatches * COMPUTE, delay=DELAY)
    ubatch_rank.plain(batch, whole)
    found = [clock.now]
    for delay in (0.0, DELAY):
        clock = Clock()
        ubatches = [
            slowed(one, clock, compute=COMPUTE, delay=delay) for one in ubatch_rank.ubatches
        ]
        ubatch_rank.ubatched(batch, ubatches)
        found.append(clock.now)
    return found


@pytest.mark.parametrize(
    "all2all",
    [
        "torch_dist",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("allgather", "shm")),
    ],
)
def test_communication_disappears_behind_compute(rank_pool, checkpoint, all2all):
    """By a clock of each rank, which other work of the machine does not delay."""
    config = config_of(checkpoint, 2, all2all)
    for plain, compute, delayed in on_ranks(rank_pool, timings, config, 2):
        assert plain == pytest.approx(compute + 2 * LAYERS * DELAY), "the delay shows nowhere"
        assert delayed == pytest.approx(compute + DELAY), "only the last exchange is waited for"
