"""Ranks for tests: a pool of processes that serve many tests, forked from a server that has imported torch.

`RankPool.run(fn, num_ranks, *args)` calls the picklable top-level function
`fn(rank, num_ranks, group_info, *args)` in `num_ranks` processes, each inside a fresh gloo group
that is destroyed afterwards. Knows nothing of what the tests exchange.
"""

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

PRELOADED = [
    *("torch", "torch.distributed", "workers.rank.epoch", "workers.rank.process"),
    "transformers.modeling_rope_utils",  # each rank would import it for the first model with scaled positions
]
START_S = 180.0
JOIN_FAILED = 70  # the exit code of a rank that could not enter its group


@dataclass(frozen=True)
class GroupInfo:
    """What a call's ranks share: a unique `name`, and a scratch folder around `store_path`."""

    name: str
    store_path: str
    timeout_s: float


class RankError(Exception):
    """At least one rank raised, died or took too long; `outcomes` has one entry per rank."""

    def __init__(self, message: str, outcomes: list[Any]):
        super().__init__(message)
        self.outcomes = outcomes


class RankFailure(Exception):
    """What one rank raised: its class name, its traceback and, if picklable, itself as `cause`."""

    def __init__(self, type_name: str, text: str, cause: BaseException | None = None):
        super().__init__(type_name, text, cause)
        self.type_name = type_name
        self.text = text
        self.cause = cause

    def __str__(self) -> str:
        return self.text


def _call(payload: bytes) -> Any:
    """Run one call in a rank process, inside its own gloo group."""
    fn, rank, num_ranks, info, backend, args = pickle.loads(payload)
    # A rank that hangs says where, before the pool ends it.
    faulthandler.dump_traceback_later(0.9 * info.timeout_s)
    try:
        if backend:
            _join_group(backend, info, rank, num_ranks)
        answer = fn(rank, num_ranks, info, *args)
    except BaseException:
        _leave_group()
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    # A function that made its own may have to keep it: NCCL's never ends while a GPU waits for another one.
    if backend:
        _leave_group()
    return answer


def _join_group(backend: str, info: GroupInfo, rank: int, num_ranks: int) -> None:
    """Enter the call's group, and come back once every rank is in."""
    import torch.distributed as dist

    store = dist.FileStore(info.store_path, num_ranks)
    timeout = timedelta(seconds=info.timeout_s)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        # gloo lets a rank in before its peers are: one that left at once would break their entry.
        store.set(f"in/{rank}", "")
        store.wait([f"in/{peer}" for peer in range(num_ranks)], timeout)
    except BaseException:
        # torch numbers groups, also those that failed: this process's next would not meet its peers'.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(JOIN_FAILED)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _failure(error: BaseException) -> RankFailure:
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankFailure(type(error).__name__, text)
    return RankFailure(type(error).__name__, text, error)


def _serve(conn: Connection) -> None:
    """A rank process: answer calls until the parent closes the pipe."""
    import torch

    torch.set_num_threads(1)
    # Each engine collects garbage when it ends, and would look at all that torch has made at its import.
    gc.freeze()
    conn.send_bytes(b"ready")
    while True:
        try:
            sys_path, payload = conn.recv()
        except (EOFError, OSError):
            return
        sys.path[:] = sys_path
        try:
            answer = pickle.dumps(_call(payload))
        except BaseException as error:
            answer = pickle.dumps(_failure(error))
        conn.send_bytes(answer)


class _Rank:
    """One process of the pool and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.conn, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child,), daemon=True)
        self.process.start()
        child.close()
        self._is_ready = False

    def wait_ready(self) -> None:
        """Wait until a new process can take calls: the first one waits for the imports of their server."""
        if not self._is_ready:
            assert self.conn.poll(START_S), f"a rank has not started within {START_S:g} s"
            self._is_ready = self.conn.recv_bytes() == b"ready"

    def close(self) -> None:
        self.conn.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class RankPool:
    """Up to `max_ranks` processes, started when first needed; a hung or dead one is replaced."""

    def __init__(self, max_ranks: int = 4):
        self.max_ranks = max_ranks
        self._ranks: list[_Rank] = []

    def outcomes(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        timeout_s: float = 120,
        with_group: bool = True,
        backend: str = "gloo",
    ) -> list[Any]:
        """The result, or the RankFailure, of each rank; `with_group=False` makes no group."""
        assert num_ranks <= self.max_ranks, f"{num_ranks} ranks of {self.max_ranks}"
        while len(self._ranks) < num_ranks:
            self._ranks.append(_Rank())
        for rank_process in self._ranks[:num_ranks]:
            rank_process.wait_ready()
        with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
            info = GroupInfo(uuid4().hex[:12], str(Path(folder) / "store"), timeout_s)
            for rank in range(num_ranks):
                group = backend if with_group else None
                payload = pickle.dumps((fn, rank, num_ranks, info, group, args))
                self._ranks[rank].conn.send((sys.path, payload))
            found = self._collect(num_ranks, time.monotonic() + timeout_s)
        if len(found) < num_ranks or any(not r.process.is_alive() for r in self._ranks):
            self.close()
        missing = RankFailure("TimeoutError", f"no answer within {timeout_s} s")
        return [found.get(rank, missing) for rank in range(num_ranks)]

    def run(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        timeout_s: float = 120,
        with_group: bool = True,
        backend: str = "gloo",
    ) -> list[Any]:
        """The result of each rank; raises RankError when any rank failed."""
        found = self.outcomes(
            fn, num_ranks, *args, timeout_s=timeout_s, with_group=with_group, backend=backend
        )
        failed = {rank: x for rank, x in enumerate(found) if isinstance(x, RankFailure)}
        if failed:
            text = "\n".join(f"--- rank {rank}\n{failure}" for rank, failure in failed.items())
            raise RankError(text, found)
        return found

    def close(self) -> None:
        """End all processes; the next call starts fresh ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()

    def _collect(self, num_ranks: int, deadline: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        open_conns = {self._ranks[rank].conn: rank for rank in range(num_ranks)}
        while open_conns and (left := deadline - time.monotonic()) > 0:
            for conn in wait(list(open_conns), left):
                rank = open_conns.pop(conn)
                try:
                    found[rank] = pickle.loads(conn.recv_bytes())
                except (EOFError, OSError):
                    self._ranks[rank].process.join(60)
                    code = self._ranks[rank].process.exitcode
                    found[rank] = RankFailure("EOFError", f"rank {rank} died, exit code {code}")
        return found


@functools.cache
def shared_pool() -> RankPool:
    """The one pool of this test process (each xdist worker has its own)."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = RankPool()
    atexit.register(pool.close)
    return pool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The shared pool as a fixture: import it in a conftest or in the test module."""
    yield shared_pool()
