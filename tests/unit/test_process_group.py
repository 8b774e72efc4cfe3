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


def test_a_join_without_its_peers_ends_when_rank_0_closes_the_store():
    store, left = process_group.host_store("127.0.0.1"), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, store.port, left)
        time.sleep(0.5)  # it waits for rank 0
        assert not joining.done(), joining.result()
        del store
        left.set()  # a slow machine may not have connected yet
        with pytest.raises(dist.DistError):
            joining.result(60)
    assert not dist.is_initialized()


def test_a_join_without_a_store_ends_when_the_rank_leaves():
    left = threading.Event()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join, closed.getsockname()[1], left)
            time.sleep(0.1)
            assert not joining.done()
            left.set()
            with pytest.raises(dist.DistError):
                joining.result(60)
