"""The process of a rank that fetches KV from other nodes and offers them the KV of this node, over NIXL.

It is apart from the rank because a read that does not end can write into memory until its process ends. So the process
ends where a read fails, and the rank starts another one: the keeper then frees what the process had reserved. It also
ends with the rank, and with the keeper. Imports no torch.
"""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import zmq

from kernels.host.owned import start_thread
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient, KeeperLostError
from workers.kv_transfer.kv_pull import FetchJob, FetchLimits, Pull
from workers.kv_transfer.kv_source import CLOSE_S, SourceLink, SourceServer
from workers.kv_transfer.nixl_memory import NixlMemory, NixlStartError, ReadFailedError

logger = logging.getLogger(__name__)

NUM_THREADS = 8
"""Fetches at once; further ones wait."""
POLL_MS, SERVING_POLL_MS = 500, 1
"""Longest waits for messages, without leases and with leases. Reads of other nodes wait meanwhile."""
NUM_PROGRESS = 16
"""Calls between two looks for messages, because one call may not move all that has come."""


@dataclass(frozen=True)
class NixlConfig:
    """What a rank starts the process with.

    keeper   of the node
    address  of this host, which other nodes reach
    """

    keeper: KeeperConfig
    address: str
    limits: FetchLimits


class NixlProcess:
    """The work of the process. The constructor attaches to the keeper and registers its memory.

    Raises KeeperLostError and NixlStartError.
    """

    def __init__(self, config: NixlConfig, rank: Connection):
        self._config, self._rank = config, rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._client = KeeperClient(config.keeper)
        self._memory = NixlMemory(f"phalanx-{os.urandom(16).hex()}", self._client.memory)
        self._server = SourceServer(
            self._context,
            config.address,
            self._memory.registered,
            self._attach,
            config.limits.lease_s,
        )
        self._pool = ThreadPoolExecutor(NUM_THREADS, "kv-fetch")
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the rank has ended or closed its end. Raises KeeperLostError."""
        poller = zmq.Poller()
        for it in (self._rank.fileno(), self._client.fileno(), self._server.socket):
            poller.register(it, zmq.POLLIN)
        self._rank.send(self._server.source)
        try:
            while True:
                serves = self._server.num_leases > 0
                ready = dict(poller.poll(SERVING_POLL_MS if serves else POLL_MS))
                if self._client.fileno() in ready:
                    raise KeeperLostError("the keeper of this node's KV has ended")
                if self._rank.fileno() in ready:
                    self._pool.submit(self._fetch, self._rank.recv())
                self._server.answer()
                self._server.expire()
                for _ in range(NUM_PROGRESS if serves else 0):
                    self._memory.progress()
        except EOFError:
            self._server.close()
            leaving = start_thread(self._client.leave, _cannot_leave, "leave-keeper")
            leaving.join(CLOSE_S)

    def _attach(self) -> KeeperClient:
        """Return a connection of its own to the keeper that owns the registered memory."""
        client = KeeperClient(self._config.keeper)
        if client.keeper != self._client.keeper:
            client.close()
            raise KeeperLostError("the keeper of this node's KV has a successor")
        return client

    def _fetch(self, job: FetchJob) -> None:
        """Fetch, and answer the rank. Ends the process where bytes may still arrive."""
        failed = True
        try:
            client = self._attach()
            pull = Pull(job, self._memory, self._client.memory, client, self._config.limits)
            try:
                pull.run(partial(SourceLink, self._context))
            except ReadFailedError as error:
                pull.result.counts["source_lost"] += len(job.items) - len(pull.result.done)
                logger.warning("a fetch of KV has failed, and this process ends: %s", error)
                self._answer(pull)
                return
            except ConnectionError as error:
                if isinstance(error, KeeperLostError):
                    raise
                logger.warning("KV of a prompt is computed here: %s", error)
            self._answer(pull)
            client.leave()
            client.close()
            failed = False
        except Exception:
            logger.exception("this process fetches KV no more")
        finally:
            if failed:
                os._exit(1)

    def _answer(self, pull: Pull) -> None:
        with self._sending:
            self._rank.send(pull.result)


def _cannot_leave(error: BaseException) -> None:
    logger.warning("the keeper is not left in order: %r", error)


def main(descriptor: int) -> None:
    """Work for the rank at the other end of a socket, which sends a NixlConfig first."""
    logging.basicConfig(format="%(asctime)s fetches of KV: %(message)s", level=logging.INFO)
    rank = Connection(descriptor)
    try:
        config: NixlConfig = rank.recv()
        NixlProcess(config, rank).run()
    except (KeeperLostError, NixlStartError, EOFError) as error:
        logger.info("ends: %r", error)
    os._exit(0)  # threads may still wait for sources
