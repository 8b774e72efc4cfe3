"""A prefill host and a decode host with a cable: it is cut in the middle of a read, and either host starts again.

The hosts are network namespaces. Each stream has the tokens of one host, and none waits much longer than the limits.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import namespaces
from tests.family_cases import family_checkpoint
from tests.held_reads import HeldReads
from tests.kv_nodes import OVER_TCP, wait_for
from workers.kv_transfer.nixl_memory import nixl_unavailable

REASON = nixl_unavailable() or namespaces.unavailable()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ROOT = Path(__file__).parents[2]
PREFILL, DECODE = 0, 1
NEW = 6
HANG_S = 30.0
"""The limits end a wait within 10 s; a busy machine takes longer for the prompt that is then computed."""


class Hosts(namespaces.TwoHosts):
    """Hosts with a /sys of their own, in which UCX finds their interfaces."""

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        script = 'mount -t sysfs sysfs /sys && exec "$@"'
        own = ["unshare", "--mount", "sh", "-c", script, "sh", *arguments]
        return super().command(host, own)


class HostEngine:
    """The engine of a host, in a process of its own."""

    def __init__(self, hosts: namespaces.TwoHosts, number: int, checkpoint: Path, folder: Path):
        arguments = [str(checkpoint), hosts.addresses[number], str(folder)]
        self._process = subprocess.Popen(
            hosts.command(number, [sys.executable, "-m", "tests.kv_host", *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **OVER_TCP, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        )

    def begin(self, *request: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)

    def run(self, *request: object) -> Any:
        self.begin(*request)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Let the engine end in order, if it still runs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Bed:
    """Two hosts with an engine each."""

    def __init__(
        self, hosts: namespaces.TwoHosts, checkpoint: Path, folder: Path, stack: ExitStack
    ):
        self.hosts, self.folder = hosts, folder
        self._checkpoint, self._stack = checkpoint, stack
        self.engines: dict[int, HostEngine] = {}
        self.reads = HeldReads(folder / str(DECODE))
        self._number = 0
        for number in (PREFILL, DECODE):
            (folder / str(number)).mkdir()
            self.start(number)

    def start(self, number: int) -> None:
        """Start the engine of a host, a first or a further one."""
        engine = HostEngine(self.hosts, number, self._checkpoint, self.folder / str(number))
        self._stack.callback(engine.close)
        assert engine.answer() == "ready"
        self.engines[number] = engine

    def prompt(self) -> list[int]:
        self._number += 1
        return [(7 * n * n + 3 * self._number) % 200 for n in range(203)]

    def whole(self, ids: list[int]) -> list[int]:
        """The tokens that the prefill host gives alone."""
        tokens, _, _ = self.engines[PREFILL].run(f"w{self._number}", ids, NEW, [], "")
        return tokens

    def prefill(self, ids: list[int]) -> tuple[list[int], str]:
        tokens, source, _ = self.engines[PREFILL].run(f"p{self._number}", ids, 1, [], "")
        return tokens, source

    def begin_decode(self, ids: list[int], tokens: list[int], source: str) -> None:
        self.engines[DECODE].begin(f"d{self._number}", ids, NEW, tokens, source)


@contextmanager
def bed(folder: Path) -> Iterator[Bed]:
    checkpoint = family_checkpoint(folder, "qwen3_moe", "untied")
    with Hosts() as hosts, ExitStack() as stack:
        yield Bed(hosts, checkpoint, folder, stack)


def test_a_cable_that_is_cut_and_hosts_that_start_again(tmp_path: Path) -> None:
    with bed(tmp_path) as now:
        fetched = serves(now, 0.0)
        for loss in (
            cut_in_the_middle,
            end_prefill_host_in_the_middle,
            end_decode_host_in_the_middle,
        ):
            began = time.monotonic()
            fetched = loss(now, fetched)
            print(f"{loss.__name__}: {time.monotonic() - began:.1f} s with what follows")


def serves(now: Bed, fetched: float) -> float:
    """A prompt goes from one host to the other; return the bytes that the decode host has fetched by now."""
    ids = now.prompt()
    tokens, source = now.prefill(ids)
    now.begin_decode(ids, tokens, source)
    rest, _, gauges = now.engines[DECODE].answer()
    assert gauges["kv_nixl_bytes"] > fetched, gauges
    assert tokens + rest == now.whole(ids)
    return float(gauges["kv_nixl_bytes"])


def serves_again(now: Bed, fetched: float) -> float:
    """As `serves`, once both hosts have another process for NIXL: UCX ends a process that loses its peer."""

    def tried() -> float:
        ids = now.prompt()
        tokens, source = now.prefill(ids)
        now.begin_decode(ids, tokens, source)
        rest, _, gauges = now.engines[DECODE].answer()
        assert tokens + rest == now.whole(ids)
        return float(gauges["kv_nixl_bytes"]) if gauges["kv_nixl_bytes"] > fetched else 0.0

    return wait_for(tried, "KV is fetched again")


def stop_in_a_read(now: Bed) -> tuple[list[int], list[int], str]:
    """Return a prompt, its first token and where its KV is, while the decode host waits in the middle of a read."""
    ids = now.prompt()
    tokens, source = now.prefill(ids)
    now.reads.hold()
    now.begin_decode(ids, tokens, source)
    wait_for(lambda: now.reads.held, "the read is in its middle")
    return ids, tokens, source


def cut_in_the_middle(now: Bed, fetched: float) -> float:
    ids, tokens, _ = stop_in_a_read(now)
    now.hosts.cut()
    now.reads.go()
    began = time.monotonic()
    rest, _, gauges = now.engines[DECODE].answer()
    waited = time.monotonic() - began
    print(f"the cable: {waited:.1f} s")
    assert waited < HANG_S and gauges["kv_nixl_bytes"] == fetched
    assert gauges["kv_nixl_source_lost"] > 0 and tokens + rest == now.whole(ids)
    ids = now.prompt()
    tokens, source = now.prefill(ids)  # the hosts do not reach each other, and nothing shows it
    now.begin_decode(ids, tokens, source)
    began = time.monotonic()
    rest, _, gauges = now.engines[DECODE].answer()
    print(f"no cable: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < HANG_S and tokens + rest == now.whole(ids)
    now.hosts.mend()
    return serves_again(now, fetched)


def end_prefill_host_in_the_middle(now: Bed, fetched: float) -> float:
    ids, tokens, _ = stop_in_a_read(now)
    now.engines[PREFILL].kill()
    wait_for(lambda: not source_lives(now), "the processes of the prefill host end")
    now.reads.go()
    began = time.monotonic()
    rest, _, _ = now.engines[DECODE].answer()
    print(f"the prefill host: {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < HANG_S
    now.start(PREFILL)
    assert tokens + rest == now.whole(ids)
    return serves_again(now, fetched)


def source_lives(now: Bed) -> bool:
    """Whether a process of the prefill host listens."""
    listed = subprocess.run(
        now.hosts.command(PREFILL, ["cat", "/proc/net/tcp"]), capture_output=True, text=True
    )
    return " 0A " in listed.stdout


def end_decode_host_in_the_middle(now: Bed, fetched: float) -> float:
    ids, tokens, source = stop_in_a_read(now)
    now.engines[DECODE].kill()
    now.reads.go()
    now.start(DECODE)
    now.begin_decode(ids, tokens, source)
    rest, _, gauges = now.engines[DECODE].answer()
    assert tokens + rest == now.whole(ids) and gauges["kv_nixl_bytes"] > 0
    return serves_again(now, float(gauges["kv_nixl_bytes"]))
