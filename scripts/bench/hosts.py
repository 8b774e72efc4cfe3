"""The engine's speed over two hosts beside the same ranks on one host, without Ray and HTTP.

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces, so they share its cores.
Each layout keeps its ranks, and the layouts take turns round by round. `vote_us` is the mean time of a vote of ranks
that do nothing else. `round_trip_us` is the median time of one datagram there and back between processes that block.
Writes JSON and prints a table. Needs root.
"""

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from kernels.all2all.payload import RowFormat
from scripts.bench import ROOT, namespaces
from scripts.bench.results import Found, add_options, markdown_table, origin, origin_line, save
from scripts.make_checkpoint import make_checkpoint
from workers.rank.process import RankProcess

# Nothing connects to Ray, but the checks want an address for several nodes.
CONFIG = """
model: {path: %s, max_model_len: 2048}
cluster: {device: cpu, threads_per_rank: 1, ray_address: auto}
cache: {num_blocks: 1024}
"""
STOP_S = 20
# argv: own address, and for the side that counts the other's.
PING = """
import socket, sys, time
own, other = sys.argv[1], sys.argv[2:]
here = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET, socket.SOCK_DGRAM)
here.bind((own, 9999))
if not other:
    print("ready", flush=True)
    while True:
        here.sendto(*here.recvfrom(100))
here.connect((other[0], 9999))
times = []
for _ in range(5000):
    started = time.perf_counter()
    here.send(bytes(80))
    here.recv(100)
    times.append(time.perf_counter() - started)
print(1e6 * sorted(times)[len(times) // 2])
"""


@dataclass
class Layout:
    """Ranks over hosts, and what was measured of them."""

    name: str
    ranks: int
    nodes: int
    settings: tuple[str, ...] = ()
    stderr: Any = None  # of the ranks, as subprocess takes it
    all2all: str = ""
    ubatches: list[str] = field(default_factory=list)  # where steps are cut, in words
    rates: list[float] = field(default_factory=list)
    vote_us: list[float] = field(default_factory=list)
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, hosts: namespaces.TwoHosts, config: Path, load: Found) -> None:
        """Start the ranks; rank 0 opens the store through which they meet."""
        sets = [f"cluster.ranks={self.ranks}", f"cluster.nodes={self.nodes}", *self.settings]
        given = {**load, "config": str(config), "settings": sets, "secret": secrets.token_hex(32)}
        for name in ("requests", "concurrency"):
            given[name] = load[name] // self.ranks
        port = 0
        for rank in range(self.ranks):
            given |= {"rank": rank, "store": (hosts.addresses[0], port)}
            command = [sys.executable, "-m", "scripts.bench.hosts_rank", json.dumps(given)]
            command = hosts.command(rank * self.nodes // self.ranks, command)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.stderr}
            self.processes.append(subprocess.Popen(command, text=True, cwd=ROOT, **pipes))
            if rank == 0:
                port = self._answers()[0]
        self.all2all, self.ubatches = self._answers()[0]

    def run(self, what: str) -> list[Any]:
        """Run a round on all ranks; return their answers."""
        self.send(what)
        return self._answers()

    def send(self, what: str) -> None:
        """Let all ranks run a round."""
        for process in self.processes:
            assert process.stdin is not None
            print(what, file=process.stdin, flush=True)

    def stop(self) -> None:
        """End the ranks; kill those that wait for a peer."""
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def _answers(self) -> list[Any]:
        found = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"a rank of {self.name!r} ended, see above")
            found.append(json.loads(line))
        return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of a round, over all ranks")
    parser.add_argument("--concurrency", type=int, default=8, help="in flight over all ranks")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--set", action="append", default=[], help="setting of all layouts")
    add_options(parser, "cpu-hosts", drawn=False)
    args = parser.parse_args()
    if problem := namespaces.unavailable():
        raise SystemExit(f"no network namespaces here: {problem}")
    found = measure(args)
    save(args.out, found)
    print(table(found))


def measure(args: argparse.Namespace) -> Found:
    """All layouts; the report."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-bench-")))
        hosts = stack.enter_context(namespaces.TwoHosts())
        config = folder / "bench.yaml"
        config.write_text(CONFIG % make_checkpoint(folder / "random-moe"), encoding="utf-8")
        floor_us = round_trip_us(hosts)
        layouts: list[Layout] = []
        for ranks in args.ranks:
            over = [
                Layout("one host", ranks, 1),
                Layout("two hosts", ranks, 2),
                Layout("two hosts, whole steps", ranks, 2, ("overlap.mode=off",)),
                Layout("two hosts, torch_dist", ranks, 2, ("kernels.all2all=torch_dist",)),
            ]
            measure_layouts(over, hosts, config, args)
            layouts += over
        shape = RankProcess(0, resolve_rank_config(load_config(config, []))).shape
        row_format = RowFormat.of(shape)
    return {
        "method": __doc__,
        **origin(0, args.commit),
        "load": {**load_of(args), "rounds": args.rounds},
        "settings": args.set,
        "round_trip_us": floor_us,
        "row_bytes": row_format.row_bytes,
        "row_and_sum_bytes": row_format.row_and_sum_bytes,
        "layouts": [describe(layout) for layout in layouts],
    }


def load_of(args: argparse.Namespace) -> Found:
    """The load of a round, over all ranks."""
    names = ("requests", "concurrency", "input_len", "output_len")
    return {name: getattr(args, name) for name in names}


def measure_layouts(
    layouts: list[Layout], hosts: namespaces.TwoHosts, config: Path, args: argparse.Namespace
) -> None:
    """Run the rounds of layouts in turn."""
    try:
        for layout in layouts:
            layout.settings += tuple(args.set)
            layout.start(hosts, config, load_of(args))
        for number in range(args.rounds):
            for layout in layouts:
                layout.rates.append(sum(layout.run("load")))
                layout.vote_us.append(median(layout.run("votes")))
                print(
                    f"round {number + 1}, {layout.ranks} ranks, {layout.name} ({layout.all2all}): "
                    f"{layout.rates[-1]:,.0f} tok/s, {layout.vote_us[-1]:.0f} us a vote",
                    file=sys.stderr,
                )
    finally:
        for layout in layouts:
            layout.stop()


def round_trip_us(hosts: namespaces.TwoHosts) -> float:
    """Median time of one datagram there and back."""
    python = [sys.executable, "-S", "-c", PING]
    first, second = hosts.addresses
    echo = subprocess.Popen(hosts.command(1, [*python, second]), stdout=subprocess.PIPE)
    try:
        assert echo.stdout is not None
        echo.stdout.readline()
        command = hosts.command(0, [*python, first, second])
        return float(subprocess.run(command, check=True, capture_output=True).stdout)
    finally:
        echo.kill()
        echo.wait()


def describe(layout: Layout) -> Found:
    """Plain data of one layout."""
    return {
        "name": layout.name,
        "ranks": layout.ranks,
        "hosts": layout.nodes,
        "all2all": layout.all2all,
        "ubatches": layout.ubatches,
        "output_tokens_per_s": [round(rate, 1) for rate in layout.rates],
        "vote_us": [round(value, 1) for value in layout.vote_us],
    }


def table(found: Found) -> str:
    """Medians, and the share of the ranks on one host."""
    rows = []
    alone: dict[int, float] = {}
    for layout in found["layouts"]:
        rate = median(layout["output_tokens_per_s"])
        base = alone.setdefault(layout["ranks"], rate)  # one host comes first
        cells = [str(layout["ranks"]), layout["name"], layout["all2all"]]
        rows.append(
            [*cells, f"{rate:,.0f}", f"{rate / base:.2f}", f"{median(layout['vote_us']):.0f}"]
        )
    head = ("ranks", "layout", "all-to-all", "output tok/s", "of one host", "vote (us)")
    floor = f"A datagram there and back: {found['round_trip_us']:.0f} us."
    return f"{origin_line(found)} {floor}\n\n{markdown_table(head, rows)}"


if __name__ == "__main__":
    main()
