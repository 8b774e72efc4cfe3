"""Lets a rank of a server fail where scripts/chaos wants it to; no other server has this folder in its PYTHONPATH.

Python imports this module in every process of the server. The file PID.NAME in the folder of the environment variable
PHALANX_FAULTS arms point NAME in process PID: the point removes the file and fails. A file `delay` there makes every
exchange wait at random; while a file `no-start` is there, no new rank starts; while a file `noise` is there, each
value between attention and experts is changed by about NOISE of it, which is the size of a rounding error. While a
file `poison` is there, each step with a request of seed POISON_SEED fails: by SIGKILL of its rank if the file contains
`die`, otherwise by an error. Point `lost` loses a message of a stream, `corrupt` changes a byte of one before it is
encrypted, `garbage` writes bytes between encrypted messages, and `reset` resets the connections of all streams. Point
`gather` changes this rank's part of a gather. Point `memory` takes memory until the process ends. A file
PID.partition cuts the process off from another one, see partition.
"""

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["PHALANX_FAULTS"])
MAX_DELAY_S = 0.05
NOISE = 1e-6
GARBAGE = bytes(range(64))
BALLOON_BYTES = 4 * 1024 * 1024
POISON_SEED = 666_000_666


class InjectedError(RuntimeError):
    """What an armed point raises."""


def armed(name: str) -> bool:
    """Whether point `name` is to fail now; the next call returns False."""
    try:
        os.unlink(FOLDER / f"{os.getpid()}.{name}")
    except FileNotFoundError:
        return False
    return True


def fail_if_armed(name: str) -> None:
    if armed(name):
        raise InjectedError(f"scripts/chaos lets {name} fail")


def before(owner: Any, method: str, action: Callable[[], None]) -> None:
    """Run `action` before each call of a method."""
    call = getattr(owner, method)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        action()
        return call(self, *args, **kwargs)

    setattr(owner, method, patched)


def take_memory() -> None:
    """Take memory without an end."""
    taken = []
    while True:
        taken.append(b"x" * BALLOON_BYTES)  # written, so that it is no mere address space


def in_forward() -> None:
    if armed("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if armed("memory"):
        take_memory()
    fail_if_armed("forward")


def in_dispatch() -> None:
    if (FOLDER / "delay").exists():
        time.sleep(random.uniform(0, MAX_DELAY_S))
    fail_if_armed("dispatch")


def in_moe() -> None:
    from kernels.pending import can_yield_ubatch

    if can_yield_ubatch():
        fail_if_armed("ubatch")


def fail_if_poisoned(batch: Any) -> None:
    """Fail a step with a request of seed POISON_SEED."""
    path = FOLDER / "poison"
    if path.exists() and any(seq.request.params.seed == POISON_SEED for seq in batch.seqs):
        if path.read_text() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedError("a request ends each rank that runs it")


def patch_points() -> None:
    import torch

    from kernels.interface.registry import backend_class
    from workers.layers.moe import MoeBlock
    from workers.runner.model_runner import ModelRunner
    from workers.scheduler.scheduler import Scheduler

    launch = ModelRunner.launch

    def launch_unless_poisoned(self: ModelRunner, batch: Any, *args: Any) -> Any:
        fail_if_poisoned(batch)
        return launch(self, batch, *args)

    ModelRunner.launch = launch_unless_poisoned  # type: ignore[method-assign]
    before(ModelRunner, "_forward", in_forward)
    before(backend_class("all2all", "shm"), "dispatch", in_dispatch)
    forward = MoeBlock.forward

    def with_noise(self: MoeBlock, residual_TD: Any, *args: Any) -> Any:
        if (FOLDER / "noise").exists():
            residual_TD = residual_TD * (1 + NOISE * torch.randn_like(residual_TD))
        return forward(self, residual_TD, *args)

    MoeBlock.forward = with_noise  # type: ignore[method-assign]
    before(MoeBlock, "forward", in_moe)
    before(Scheduler, "commit", lambda: fail_if_armed("commit"))


def in_init() -> None:
    if (FOLDER / "no-start").exists():
        raise InjectedError("scripts/bench/recovery lets no rank start")


def patch_actor() -> None:
    from workers.rank.actor import RankActor

    before(RankActor, "__init__", in_init)


class _Unspecified(ctypes.Structure):
    """A sockaddr of AF_UNSPEC: `connect` to it resets a TCP connection."""

    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_char * 14))


def reset_streams(ports: set[int]) -> None:
    """Reset this process's TCP connections from or to `ports`, as a firewall does that has lost them."""
    import psutil

    libc, address = ctypes.CDLL(None), _Unspecified()
    for link in psutil.Process().net_connections("tcp"):
        if link.raddr and {link.laddr.port, link.raddr.port} & ports:
            libc.connect(link.fd, ctypes.byref(address), ctypes.sizeof(address))


def insert_garbage(ports: set[int]) -> None:
    """Write bytes into this process's TCP connections from or to `ports`, between the frames of their messages."""
    import psutil

    for link in psutil.Process().net_connections("tcp"):
        if link.raddr and {link.laddr.port, link.raddr.port} & ports:
            with contextlib.suppress(OSError):  # the buffer is full
                os.write(link.fd, GARBAGE)


def corrupted(message: bytes) -> bytes:
    """Return a message with a changed byte in its middle, so that it is no JSON any more."""
    middle = len(message) // 2
    return message[:middle] + b"\xff" + message[middle + 1 :]


def patch_gather() -> None:
    from workers.rank.process_group import _Signer

    signed = _Signer.signed

    def signed_or_changed(self: _Signer, *args: Any) -> bytes:
        part = signed(self, *args)
        return corrupted(part) if armed("gather") else part

    _Signer.signed = signed_or_changed  # type: ignore[method-assign]


def patch_wire() -> None:
    from workers.wire import secure_socket
    from workers.wire.numbering import UNCHECKED
    from workers.wire.secure_socket import Sender, StreamAddress

    connect, listen, send = secure_socket.connect, secure_socket.listen, Sender.send
    ports: set[int] = set()

    def note(address: StreamAddress) -> None:
        ports.add(int(address.endpoint.rpartition(":")[2]))

    def connect_noted(context: Any, address: StreamAddress, *kind: Any) -> Any:
        note(address)
        return connect(context, address, *kind)

    def listen_noted(*args: Any) -> Any:
        found = listen(*args)
        note(found[1])
        return found

    def send_or_lose(self: Sender, message: bytes, *frames: bytes) -> None:
        if self._stream != UNCHECKED and armed("lost"):
            self.num_sent += 1
            return
        if self._stream != UNCHECKED and armed("corrupt"):
            message = corrupted(message)
        send(self, message, *frames)
        if self._stream != UNCHECKED and armed("reset"):
            reset_streams(ports)
        if self._stream != UNCHECKED and armed("garbage"):
            insert_garbage(ports)

    importlib.import_module("partition").watch(
        FOLDER, ports
    )  # of this folder, which is in the PYTHONPATH
    secure_socket.connect, secure_socket.listen = connect_noted, listen_noted
    Sender.send = send_or_lose  # type: ignore[method-assign]


# By the module after whose import they run; ranks alone import the first, when all that is patched can be imported.
PATCHES = {
    "workers.rank.epoch": patch_points,
    "workers.rank.actor": patch_actor,
    "workers.rank.process_group": patch_gather,
    "workers.wire.secure_socket": patch_wire,
}


class Finder:
    """Patches when a module of PATCHES has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            patch()

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, Finder())
