"""The actor of `phalanx check --cluster` on one node: facts, ports, clock. Knows nothing of Ray."""

import os
import socket
import time

from workers.config import ModelSection
from workers.rank.checkpoint_holder import CheckpointHolder
from workers.rank.network import bind_to_address, interface_of
from workers.rank.node_facts import NodeFacts, node_facts
from workers.weights.checkpoint_files import CheckpointFiles

CONNECT_TIMEOUT_S = 3.0


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
