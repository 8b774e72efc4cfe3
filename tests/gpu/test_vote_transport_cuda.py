"""The ranks' vote over NCCL: every row reaches every rank, who stays away is noticed, and compute holds nothing up."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import need_gpus, take_gpu
from tests.distributed.rank_pool import RankPool
from tests.gpu.pools import Pools
from workers.engine.step_sync import NUM_FIELDS, LockstepError
from workers.engine.vote_transport import DeviceVoteTransport, make_vote_transport
from workers.parallel import ParallelDims
from workers.rank import process_group
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROUNDS = 400
LATE_EVERY = 10  # rounds, the ranks in turn
PATIENT_S, NOTICED_S = 30.0, 2.0  # how long a rank waits for the others
CYCLES = 4_000_000_000  # some 2 s of one SM
_kept: list[Any] = []  # a GPU that waits for a peer for ever lets nobody free its memory


def join(
    rank: int, num_ranks: int, rendezvous: Rendezvous, timeout_s: float
) -> DeviceVoteTransport:
    """The exchange of a rank in a fresh group without shared memory; collective."""
    device = take_gpu(rank)
    process_group.join(rendezvous, rank, ParallelDims(num_ranks=num_ranks), device, 60)
    exchange = make_vote_transport(num_ranks, device, timeout_s, None)
    assert isinstance(exchange, DeviceVoteTransport)
    return exchange


def draw(num_rounds: int, num_ranks: int) -> np.ndarray:
    """Any int64 [rounds, ranks, fields], the same in every process."""
    shape = (num_rounds, num_ranks, NUM_FIELDS)
    limits = np.iinfo(np.int64)
    return np.random.default_rng(0).integers(limits.min, limits.max, shape, endpoint=True)


def vote(
    rank: int, num_ranks: int, _info: Any, rendezvous: Rendezvous, late_s: float
) -> list[tuple[float, float]]:
    """When this rank came to each round, and when it had the rows of all."""
    exchange = join(rank, num_ranks, rendezvous, PATIENT_S)
    times = []
    for number, expected in enumerate(draw(ROUNDS, num_ranks)):
        if number % (LATE_EVERY * num_ranks) == LATE_EVERY * rank:
            time.sleep(late_s)
        came = time.monotonic()
        found = exchange.all_gather(expected[rank])
        times.append((came, time.monotonic()))
        assert found.dtype == np.int64
        assert np.array_equal(found, expected), (number, found.tolist(), expected.tolist())
    process_group.leave()
    return times


def vote_beside_compute(rank: int, num_ranks: int, _info: Any, rendezvous: Rendezvous) -> bool:
    """Whether a long kernel that was launched before a vote still runs when the rows are there."""
    exchange = join(rank, num_ranks, rendezvous, PATIENT_S)
    first, second = draw(2, num_ranks)
    exchange.all_gather(first[rank])
    torch.cuda._sleep(1)
    torch.cuda.synchronize()  # all that is loaded at first use is there
    done = torch.cuda.Event()
    torch.cuda._sleep(CYCLES)
    done.record()
    found = exchange.all_gather(second[rank])
    running = not done.query()
    assert np.array_equal(found, second)
    torch.cuda.synchronize()
    process_group.leave()
    return running


def lose_the_last(
    rank: int, num_ranks: int, _info: Any, rendezvous: Rendezvous, rounds: int
) -> tuple[str, float] | None:
    """The last rank lives on, but comes to no vote after so many: what each other met, after how many seconds.

    The processes end as actors do: without a word to their GPUs.
    """
    exchange = join(rank, num_ranks, rendezvous, NOTICED_S)
    _kept.append(exchange)
    *before, last = draw(rounds + 1, num_ranks)
    for rows in before:
        exchange.all_gather(rows[rank])
    if rank == num_ranks - 1:
        return None
    started = time.monotonic()
    try:
        exchange.all_gather(last[rank])
    except LockstepError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the missing rank was not noticed")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("late_s", [0.0, 0.02])
def test_rows_of_all_ranks(pools: Pools, num_ranks: int, late_s: float):
    need_gpus(num_ranks)
    with local_rendezvous() as rendezvous:
        found = pools.run(vote, num_ranks, rendezvous, late_s, with_group=False)
    for number, times in enumerate(zip(*found, strict=True)):
        came, had = zip(*times, strict=True)  # by the one clock of this host
        assert max(came) <= min(had), f"round {number} was over before all had come: {times}"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_compute_does_not_delay_a_vote(pools: Pools, num_ranks: int):
    need_gpus(num_ranks)
    with local_rendezvous() as rendezvous:
        running = pools.run(vote_beside_compute, num_ranks, rendezvous, with_group=False)
    assert running == [True] * num_ranks, "a vote waited for what computes"


@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 20), (4, 20)])
def test_a_rank_that_stays_away_is_noticed(num_ranks: int, rounds: int):
    need_gpus(num_ranks)
    pool = RankPool(num_ranks)
    with local_rendezvous() as rendezvous:  # closed after the processes, which may still be in it
        try:
            arguments = (rendezvous, rounds)
            *others, _ = pool.run(lose_the_last, num_ranks, *arguments, with_group=False)
        finally:
            pool.close()
    for text, waited in others:
        assert text == f"vote: a rank sent no row within {NOTICED_S:g} s"
        assert NOTICED_S <= waited < 3 * NOTICED_S
