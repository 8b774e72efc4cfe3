"""Joins the ranks of one epoch: the rendezvous store and torch.distributed."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, but not in __all__

from workers.parallel import ParallelDims
from workers.rank.rank_info import Rendezvous

T = TypeVar("T")

# The vote detects a lost rank; this timeout only bounds collectives of a group that ends.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
ATTEMPT_S = 1.0  # of one attempt to reach the store
RETRY_S = 0.1
CLIENT_S = 30.0  # of the store's client, once the store can be reached


def host_store(host: str) -> TCPStore:
    """Return the store of a new group, on a free port of `host` alone; rank 0 must hold it.

    Without a socket of ours the store would listen on all interfaces.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port, owned = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=owned)


@contextmanager
def local_rendezvous() -> Iterator[Rendezvous]:
    """Yield a rendezvous for processes of this machine, open while the block runs; for benchmarks and tests."""
    store = host_store("127.0.0.1")
    yield Rendezvous("127.0.0.1", store.port, f"local-{store.port}")


def join(
    rendezvous: Rendezvous,
    rank: int,
    dims: ParallelDims,
    device: torch.device,
    timeout_s: float,
    left: threading.Event | None = None,
) -> None:
    """Join the process group: gloo for host tensors, and NCCL beside it on GPUs.

    Raises torch.distributed.DistError or RuntimeError when a peer does not join within `timeout_s` seconds, when the
    store closes, and when `left` is set while the store cannot be reached.
    """
    store = _connect(rendezvous, time.monotonic() + timeout_s, left or threading.Event())
    # The store's own timeout bounds the wait for late ranks, the group's bounds its collectives.
    store.set_timeout(timedelta(seconds=timeout_s))
    on_gpu = device.type == "cuda"
    # torch counts each attempt and writes its keys under the number: after a join that failed, this rank would never
    # meet a new process.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore(rendezvous.name, store),
        rank=rank,
        world_size=dims.num_ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )


def _connect(rendezvous: Rendezvous, deadline: float, left: threading.Event) -> TCPStore:
    """Return a client of the store, once a plain socket has reached the store.

    The constructor cannot be interrupted and prints a stack trace after its timeout. Within the timeout it looks up the
    name of the store's host, for 10 s where a name server does not answer.
    """
    _reach(rendezvous, deadline, left)
    client_s = min(CLIENT_S, max(ATTEMPT_S, deadline - time.monotonic()))
    return TCPStore(
        rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=client_s)
    )


def _reach(rendezvous: Rendezvous, deadline: float, left: threading.Event) -> None:
    """Return when the store accepts connections. Raises DistNetworkError after `deadline`, or when `left` is set."""
    address = rendezvous.host, rendezvous.port
    while True:
        try:
            socket.create_connection(address, ATTEMPT_S).close()
            return
        except OSError as error:
            if left.wait(RETRY_S) or time.monotonic() >= deadline:
                raise dist.DistNetworkError(
                    f"no connection to the store of rank 0 at {address[0]}, port {address[1]}: {error}"
                ) from None


def gather_objects(value: T) -> list[T]:
    """Return `value` of every rank, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leave() -> None:
    """Destroy the process group, with all its communicators; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort(device: torch.device) -> None:
    """End the collectives of a GPU's communicators, from any thread; they cannot be used again.

    gloo ends a rank's collectives when a peer closes its sockets, which `leave` does.
    """
    if device.type == "cuda" and dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
