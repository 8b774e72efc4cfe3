"""Copies a checkpoint's files between nodes: a server on a node that has them, and the copy on a node that lacks some.

A copy that was interrupted continues where it ended. A file takes its name only when its SHA-256 is that of the
server's file. The server answers holders of its key alone; like the rows of the all-to-all, files travel unencrypted.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kernels.host.file_locks import file_holder, lock_file
from kernels.host.owned import start_thread
from workers.hub import part_bytes
from workers.weights.checkpoint_files import CheckpointError, FileFacts

logger = logging.getLogger(__name__)

NONCE_BYTES, DIGEST_BYTES = 16, 32
BUFFER_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 30.0
ATTEMPTS = 3
LOCK_POLL_S = 0.2  # between two attempts to lock a file that another process copies
NUM_STREAMS = 4  # one TCP connection and one core for SHA-256 each


class CopyError(CheckpointError):
    """A checkpoint cannot be copied from another node."""


@dataclass(frozen=True)
class CopyAddress:
    """Where a server listens, and the key that it demands."""

    host: str
    port: int
    key: bytes = field(repr=False)


class CheckpointServer:
    """Sends the files `names` of `folder`, in threads, until `close`. Listens on a free port of `host`."""

    def __init__(self, folder: Path, names: frozenset[str], host: str):
        key = secrets.token_bytes(32)
        self._digests = ThreadPoolExecutor(NUM_STREAMS)
        source = _Source(folder, names, key, self._digests)
        handler = partial(_Handler, source)
        server_class = _ServerV6 if ":" in host else _Server
        self._server = server_class((host, 0), handler)
        self.address = CopyAddress(host, self._server.server_address[1], key)
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        start_thread(serve, self._fail, "share-checkpoint")

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._digests.shutdown(wait=False, cancel_futures=True)

    def _fail(self, error: BaseException) -> None:
        """Close the port, so that copies fail at once on the other nodes."""
        logger.error("the checkpoint is no longer shared with other nodes", exc_info=error)
        self._server.server_close()


def copy_files(
    address: CopyAddress,
    files: Mapping[str, FileFacts],
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Copy the files that `folder` lacks. Raises CopyError, after ATTEMPTS broken connections to one file.

    progress gets the bytes that are there and the bytes of all files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lacking = {name: facts for name, facts in files.items() if not (folder / name).exists()}
    total = sum(facts.size for facts in files.values())
    bar = _Bar(total - sum(facts.size for facts in lacking.values()), total, progress)
    _check_space(folder, lacking)
    failed = threading.Event()
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        copies = [
            threads.submit(_copy_file, address, folder, name, facts.size, bar, failed)
            for name, facts in lacking.items()
        ]
        try:
            for copy in as_completed(copies):
                copy.result()
        except BaseException:
            failed.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


class _Bar:
    def __init__(self, done: int, total: int, report: Callable[[int, int], None]):
        self._done, self._total, self._report = done, total, report
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._report(self._done, self._total)


def _part_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _check_space(folder: Path, lacking: Mapping[str, FileFacts]) -> None:
    needed = sum(facts.size for facts in lacking.values())
    needed -= sum(part_bytes(_part_of(folder / name)) for name in lacking)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CopyError(
            f"the checkpoint needs {needed / 1e9:,.1f} GB more in {folder}, the disk has {free / 1e9:,.1f} GB free"
        )


def _copy_file(
    address: CopyAddress, folder: Path, name: str, size: int, bar: _Bar, failed: threading.Event
) -> None:
    """Copy one file. A process that copies the same file into a shared folder waits for the first.

    failed   another file cannot be copied: wait no more
    """
    target = folder / name
    part = _part_of(target)
    part.parent.mkdir(exist_ok=True)
    with part.open("a+b") as out:
        _lock(out.fileno(), target, bar, failed)
        if target.exists():  # the other process has copied it; `part` may be a new, empty file
            part.unlink(missing_ok=True)
            bar.add(size)
            return
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if _continue(address, name, out.fileno(), size, bar):
                    break
                os.truncate(out.fileno(), 0)
                reason = "its SHA-256 differs from that of the source"
            except (OSError, EOFError) as error:
                reason = f"{error}" or type(error).__name__
            if attempt == ATTEMPTS:
                raise CopyError(
                    f"{target} cannot be copied from {address.host} in {ATTEMPTS} attempts: {reason}"
                )
        os.fsync(out.fileno())
        part.rename(target)


def _lock(out: int, target: Path, bar: _Bar, failed: threading.Event) -> None:
    """Wait until no other process copies the file. The bytes of the other copy count as progress meanwhile."""
    counted, reported = 0, False
    try:
        while not lock_file(out):
            if not reported:
                logger.warning(
                    "%s copies %s to this shared folder; this process waits",
                    file_holder(out),
                    target,
                )
                reported = True
            if failed.wait(LOCK_POLL_S):
                raise CancelledError
            written = os.fstat(out).st_size
            bar.add(written - counted)
            counted = written
    finally:
        bar.add(-counted)


def _continue(address: CopyAddress, name: str, out: int, size: int, bar: _Bar) -> bool:
    """Append what a begun copy lacks. Return whether the whole then has the source's digest."""
    begun = os.fstat(out).st_size
    if begun > size:
        os.truncate(out, 0)
        begun = 0
    digest = hashlib.sha256()
    counted, same = 0, False
    try:
        with os.fdopen(os.dup(out), "rb") as written:
            written.seek(0)
            while block := written.read(BUFFER_BYTES):
                digest.update(block)
                counted += len(block)
                bar.add(len(block))
        # The server reads the file for the digest while it sends it, so the second read is of memory.
        with (
            _ask(address, {"digest": name}) as answer,
            _ask(address, {"read": name, "from": begun}) as rows,
        ):
            buffer = memoryview(bytearray(BUFFER_BYTES))
            while counted < size:
                received = rows.recv_into(buffer[: min(BUFFER_BYTES, size - counted)])
                if not received:
                    raise EOFError(f"the connection ended after {counted} of {size} bytes")
                _write_all(out, buffer[:received])
                digest.update(buffer[:received])
                counted += received
                bar.add(received)
            same = hmac.compare_digest(_receive(answer, DIGEST_BYTES), digest.digest())
    finally:
        if not same:
            bar.add(-counted)
    return same


def _ask(address: CopyAddress, request: dict[str, object]) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), TIMEOUT_S)
    try:
        nonce = _receive(connection, NONCE_BYTES)
        connection.sendall(hmac.digest(address.key, nonce, "sha256"))
        connection.sendall(json.dumps(request).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError("the other node closed the connection")
        received += part
    return received


def _write_all(out: int, data: memoryview) -> None:
    while data:
        data = data[os.write(out, data) :]


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Source:
    """The folder of a server. A digest is computed once for all nodes that copy the file."""

    def __init__(
        self, folder: Path, names: frozenset[str], key: bytes, threads: ThreadPoolExecutor
    ):
        self.folder, self.names, self.key = folder, names, key
        self._threads = threads
        self._digests: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()

    def digest(self, name: str) -> bytes:
        with self._lock:
            if name not in self._digests:
                self._digests[name] = self._threads.submit(_digest, self.folder / name)
        return self._digests[name].result()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class _Handler(socketserver.StreamRequestHandler):
    timeout = TIMEOUT_S

    def __init__(self, source: _Source, *args: Any):
        self._source = source
        super().__init__(*args)

    def handle(self) -> None:
        source, nonce = self._source, secrets.token_bytes(NONCE_BYTES)
        try:
            self.wfile.write(nonce)
            proof = self.rfile.read(DIGEST_BYTES)
            if hmac.compare_digest(proof, hmac.digest(source.key, nonce, "sha256")):
                self._answer(json.loads(self.rfile.readline(BUFFER_BYTES)))
        except (OSError, ValueError, CancelledError):
            return  # the client is gone, sent no request, or the server closes; it sees the end of the connection

    def _answer(self, request: dict[str, Any]) -> None:
        source = self._source
        match request:
            case {"digest": str(name)} if name in source.names:
                self.connection.sendall(source.digest(name))
            case {"read": str(name), "from": int(start)} if name in source.names:
                with (source.folder / name).open("rb") as file:
                    self.connection.sendfile(file, start)
