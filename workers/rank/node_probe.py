"""The actor of `phalanx check --cluster` on one node: facts, ports, clock, bandwidth. Knows nothing of Ray."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.config import ModelSection
from workers.parallel import ParallelDims
from workers.rank.checkpoint_holder import CheckpointHolder
from workers.rank.network import bind_to_address, interface_of
from workers.rank.node_facts import NodeFacts, node_facts
from workers.rank.rank_info import Rendezvous
from workers.weights.checkpoint_files import CheckpointFiles

CONNECT_TIMEOUT_S = 3.0
MESSAGE_BYTES = 32 * 1024 * 1024
NUM_MESSAGES = 8
NUM_ROUND_TRIPS = 50


@dataclass(frozen=True)
class PairSpeed:
    """Between two nodes: bytes per second in one direction, and seconds of a round trip of 8 bytes."""

    bytes_per_s: float
    round_trip_s: float


class NodeProbe:
    """Looks at the node that has `address` in the Ray cluster."""

    def __init__(self, address: str, model: ModelSection):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an actor without any
        bind_to_address(os.environ, address)
        self._address = address
        self._holder = CheckpointHolder(model, address)
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self._store: Any = None

    def facts(self) -> NodeFacts:
        """Return the facts of the node."""
        return node_facts()

    def checkpoint(self) -> CheckpointFiles:
        """Return the checkpoint's files on the node."""
        return self._holder.files()

    def interface(self) -> str:
        """Return the network interface of the address."""
        return interface_of(self._address) or "unknown"

    def port(self) -> int:
        """Return a port on which this node listens."""
        return int(self._listener.getsockname()[1])

    def reach(self, ports: dict[str, int]) -> dict[str, str]:
        """Connect to each address at its port; return the error of each that cannot be reached."""
        failures = {}
        for address, port in ports.items():
            try:
                socket.create_connection((address, port), CONNECT_TIMEOUT_S).close()
            except OSError as error:
                failures[address] = error.strerror or str(error)
        return failures

    def clock(self) -> float:
        """Return the seconds since 1970 by this node's clock."""
        return time.time()

    def host_store(self) -> tuple[str, int]:
        """Open the store by which two nodes meet; return its host and port."""
        from workers.rank import process_group

        self._store = process_group.host_store(self._address)
        return self._store.host, self._store.port

    def measure(
        self, meet: Rendezvous, index: int, device_type: str, timeout_s: float
    ) -> PairSpeed:
        """Exchange messages with the other node of a pair, by NCCL from GPU 0 or by gloo. `index` is 0 or 1."""
        import torch

        from workers.rank import process_group

        device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
        dims = ParallelDims(num_ranks=2, num_nodes=2)
        process_group.join(meet, index, dims, device, timeout_s)
        try:
            large = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
            small = torch.zeros(8, dtype=torch.uint8, device=device)
            _ping(small, index, 2)  # connects
            round_trips = [_ping(small, index, 1) for _ in range(NUM_ROUND_TRIPS)]
            _stream(large, index, 1)
            seconds = _stream(large, index, NUM_MESSAGES)
        finally:
            process_group.leave()
            self._store = None
        return PairSpeed(MESSAGE_BYTES * NUM_MESSAGES / seconds, _median(round_trips))


def _ping(message: Any, index: int, count: int) -> float:
    """Send a message there and back `count` times; return the seconds of one."""
    import torch.distributed as dist

    started = time.perf_counter()
    for _ in range(count):
        for sender in (0, 1):
            if index == sender:
                dist.send(message, 1 - index)
            else:
                dist.recv(message, 1 - index)
    _finish(message)
    return (time.perf_counter() - started) / count


def _stream(message: Any, index: int, count: int) -> float:
    """Send `count` messages from node 0 to node 1 and one byte back; return the seconds."""
    import torch.distributed as dist

    _finish(message)
    started = time.perf_counter()
    for _ in range(count):
        if index == 0:
            dist.send(message, 1)
        else:
            dist.recv(message, 0)
    end = message[:1].clone()
    if index == 0:
        dist.recv(end, 1)
    else:
        dist.send(end, 0)
    _finish(message)
    return time.perf_counter() - started


def _finish(message: Any) -> None:
    if message.is_cuda:
        import torch

        torch.cuda.synchronize()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
