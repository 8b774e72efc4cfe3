"""Joins the ranks of one epoch: the rendezvous store and torch.distributed.

A process that reaches the store's port can join gloo's sockets, so a gather carries JSON and is signed.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, but not in __all__

from workers.parallel import ParallelDims
from workers.rank.rank_info import Rendezvous, SignatureError

# The vote detects a lost rank; this timeout only bounds collectives of a group that ends.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
ATTEMPT_S = 1.0  # of one attempt to reach the store
RETRY_S = 0.1
CLIENT_S = 30.0  # of the store's client, once the store can be reached
_SIGNATURE_BYTES = 32


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
    name = f"local-{secrets.token_hex(16)}"
    secret = secrets.token_bytes(32)
    yield Rendezvous("127.0.0.1", store.port, name, secret=secret, store=name)


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
    _signer.begin(rendezvous.secret)
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


class _Signer:
    """Signs the parts of the gathers of one group, with a secret that its ranks alone got through Ray."""

    def __init__(self) -> None:
        self._secret = b""
        self._gather = 0

    def begin(self, secret: bytes) -> None:
        """Begin the gathers of a group."""
        self._secret, self._gather = secret, 0

    def signed(self, rank: int, value: Any) -> bytes:
        """Return a rank's part of the next gather."""
        data = json.dumps(value).encode()
        return self._signature(rank, data) + data

    def opened(self, parts: list[bytes]) -> list[Any]:
        """Return the values of the parts of this gather, in rank order. Raises SignatureError."""
        values = []
        for rank, part in enumerate(parts):
            signature, data = part[:_SIGNATURE_BYTES], part[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, self._signature(rank, data)):
                raise SignatureError(
                    f"what rank {rank} has sent is not signed by a rank of this group"
                )
            values.append(json.loads(data))
        self._gather += 1
        return values

    def _signature(self, rank: int, data: bytes) -> bytes:
        assert self._secret, "the rendezvous of this group has no secret"
        return hmac.digest(self._secret, b"%d %d " % (self._gather, rank) + data, "sha256")


_signer = _Signer()  # of torch's default group, of which a process has one


def gather_json(value: Any) -> list[Any]:
    """Return `value` of every rank, in rank order, as JSON carries it: tuples become lists. Collective."""
    part = _signer.signed(dist.get_rank(), value)
    ranks = range(dist.get_world_size())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(part)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(parts, padded)
    pairs = zip(parts, sizes, strict=True)
    return _signer.opened([tensor[: int(size)].numpy().tobytes() for tensor, size in pairs])


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
