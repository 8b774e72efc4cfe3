"""A join that waits for peers ends when the store closes, or when the rank leaves."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from workers.parallel import ParallelDims
from workers.rank import process_group
from workers.rank.rank_info import Rendezvous

FAR_S = 300.0  # time limit of a join


def join(port: int, left: threading.Event) -> None:
    rendezvous = Rendezvous("127.0.0.1", port, "alone")
    cpu = torch.device("cpu")
    process_group.join(rendezvous, 1, ParallelDims(num_ranks=2), cpu, FAR_S, left)


@pytest.fixture(autouse=True)
def without_a_group():
    yield
    process_group.leave()


def failed_join() -> None:
    store, left = process_group.host_store("127.0.0.1"), threading.Event()
    before = store.num_keys()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, store.port, left)
        while store.num_keys() == before and not joining.done():  # then it waits for rank 0
            time.sleep(0.01)
        assert not joining.done(), joining.result()
        del store
        left.set()  # a slow machine may not have connected yet
        with pytest.raises(dist.DistError):
            joining.result(60)


def test_a_join_without_its_peers_ends_when_rank_0_closes_the_store():
    failed_join()
    assert not dist.is_initialized()


def name_of_group() -> str:
    """The name of this process's next group: its ranks write their keys in the store under it."""
    with process_group.local_rendezvous() as rendezvous:
        alone, cpu = ParallelDims(num_ranks=1), torch.device("cpu")
        process_group.join(rendezvous, 0, alone, cpu, FAR_S)
        name = dist.group.WORLD.group_name
        process_group.leave()
    return name


def test_a_rank_meets_new_processes_after_a_join_that_failed():
    failed_join()
    after = name_of_group()
    assert after == name_of_group(), "the leave of a group makes the process as new"


def test_a_join_without_a_store_ends_when_the_rank_leaves():
    left = threading.Event()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join, closed.getsockname()[1], left)
            time.sleep(0.1)
            assert not joining.done()
            left.set()
            with pytest.raises(dist.DistError, match="no connection to the store of rank 0"):
                joining.result(60)
