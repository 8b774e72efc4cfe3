"""A server with a prefill group on one host of a bed and a decode group on another one, and the clients of a test."""

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import hosts
from tests.cluster.hosts import ROOT, Bed, Host, wait_for
from tests.cluster.launched import TOKEN, Server, rank_processes, ray_command, share_token
from tests.held_reads import HeldReads

START_S = 300.0
SILENCE_S = 100.0
"""Silence after which a client gives up: that of a busy machine is longer than a wait for KV."""
NUM_REQUESTS = 12
SETTINGS = (
    *("cluster.ray_address=auto", "serve.model_name=demo", "model.max_model_len=2048"),
    *("cache.host_memory_gib=0.1", "overlap.mode=off"),
)
# The first host has two CPUs for the group of two ranks, the second host one CPU for the other group.
POOLS = {
    "decode": "pool=[{role: prefill, ranks: 1}, {role: decode, ranks: 2}]",
    "prefill": "pool=[{role: prefill, ranks: 2}, {role: decode, ranks: 1}]",
}
# Python imports it at its start. A read waits behind the first part of a fetch.
HOOK = """
import sys
if any("nixl_process" in word for word in sys.orig_argv):
    from tests.held_reads import hold_reads
    from workers.kv_transfer import kv_pull
    kv_pull.PART_BYTES = 2**18
    hold_reads({folder!r}, after=1)
"""
METRICS = """
import sys, urllib.request
for line in urllib.request.urlopen("http://127.0.0.1:8000/metrics", timeout=60).read().decode().splitlines():
    if line.startswith("phalanx:" + sys.argv[1] + "{"):
        print(line)
"""
HOSTS_OF_GROUPS = """
import json, logging, ray
from ray.util import placement_group_table
ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
print(json.dumps({group["name"]: addresses[group["bundles_to_node_id"][0]] for group in groups}))
"""

WAIT_FREE = """
import logging, time, ray
ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
    time.sleep(0.1)
"""


def body(number: int) -> dict[str, Any]:
    """Return one of NUM_REQUESTS requests.

    Of four requests one has a long answer, two have a long prompt, and one has a prompt that is not handed over.
    """
    length, answer = ((300, 400), (1500, 40), (1500, 40), (100, 40))[number % 4]
    prompt = [(number * 31 + 7 * n * n) % 199 for n in range(length)]
    return {"prompt": prompt, "max_tokens": answer}


class Asked:
    """A client of request `number`, and the tokens that it must get; no other request has its `salt`."""

    def __init__(
        self, server: Server, number: int, salt: str = "", expected: Sequence[int] | None = None
    ):
        self._expected = expected
        fields = body(number) | ({"cache_salt": salt} if salt else {})
        self.stream = server.stream(fields.pop("max_tokens"), SILENCE_S, **fields)

    @property
    def runs(self) -> bool:
        """Whether tokens have come."""
        return len(self.stream.events()) > 2

    def end(self) -> list[int]:
        """Wait for the end; return the tokens."""
        events = self.stream.wait(300)
        assert events and events[-1].get("done"), events[-1:]
        tokens = [token for event in events for token in event.get("ids", ())]
        assert self._expected is None or tokens == self._expected, (
            "a token is lost, doubled or other"
        )
        return tokens

    @property
    def pause(self) -> float:
        """The longest time between two tokens, in seconds."""
        times = [event["at"] for event in self.stream.events()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


class Split:
    """Two hosts; `start` starts the server on the first one, whose group is that of the role `first`.

    reads  of the decode group
    """

    def __init__(self, bed: Bed, first: str):
        self.bed, self._first = bed, first
        self.head, self.other = bed.hosts
        in_order = (self.head, self.other) if first == "prefill" else (self.other, self.head)
        self.prefill, self.decode = in_order
        self.reads = HeldReads(self.decode.folder)
        self._salts = itertools.count()
        self._expected: list[list[int]] = []
        self._environments = {host.name: _environment(host) for host in bed.hosts}
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def start_ray(self) -> None:
        share_token(self.head, [self.other])
        ray = ("start", "--head", "--port=6379", "--num-cpus=2", "--include-dashboard=false")
        self._ray(self.head, *ray)
        self._ray(self.other, "start", f"--address={self.head.address}:6379", "--num-cpus=1")

    def compute_expected(self) -> None:
        """Let a server without roles answer all requests."""
        server = self._start("cluster.nodes=1", "cluster.ranks=1")
        asked = [Asked(server, number) for number in range(NUM_REQUESTS)]
        self._expected = [it.end() for it in asked]
        server.stop()
        self._python(WAIT_FREE)

    def start(self) -> None:
        """Start the server. The groups have their hosts."""
        pool = (POOLS[self._first], "cluster.nodes=2", "cluster.ranks=3", "cache.transfer=nixl")
        self._server = self._start(*pool)
        groups = json.loads(self._python(HOSTS_OF_GROUPS))
        places = {name.partition(":")[0]: address for name, address in groups.items()}
        assert places == {"phalanx-0": self.prefill.address, "phalanx-1": self.decode.address}

    def ask(self, number: int = 1) -> Asked:
        """Begin a request, of which no rank has a token in its cache."""
        salt = f"salt {next(self._salts)}"
        return Asked(self.server, number, salt, self._expected[number])

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over all ranks."""
        lines = self.head.python(METRICS, name).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)

    def states(self) -> dict[str, str]:
        """The state of each group, by its role."""
        return {group["role"]: group["state"] for group in self.server.groups()}

    def wait_fetched(self) -> None:
        """Return when a prompt has been handed over."""

        def tried() -> bool:
            before = self.metric("kv_fetched_bytes_total")
            self.ask().end()
            return self.metric("kv_fetched_bytes_total") > before

        wait_for(tried, START_S, "KV is fetched")

    def kill_ranks(self, host: Host) -> None:
        for pid in rank_processes(host):
            host.run("kill", "-KILL", pid)

    def _python(self, script: str) -> str:
        """Run a script with Ray on the first host; return its output."""
        ended = self.head.run(sys.executable, "-c", script, environment=TOKEN)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    def _start(self, *overrides: str) -> Server:
        environment = self._environments[self.head.name]
        server = Server(self.head, *SETTINGS, *overrides, environment=environment)
        server.wait_ready(START_S)
        return server

    def _ray(self, host: Host, *arguments: str) -> None:
        address = f"--node-ip-address={host.address}"
        ray_command(host, *arguments, address, environment=self._environments[host.name])


def _package() -> list[Path]:
    """The folder that has the package of NIXL, if that is none of Python's own."""
    spec = importlib.util.find_spec("nixl_cu12")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parents[1]
    return [] if folder.is_relative_to(sys.prefix) else [folder]


def _environment(host: Host) -> dict[str, str]:
    """Variables of a host, with its hook."""
    folder = host.folder / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK.format(folder=str(host.folder)))
    paths = (folder, ROOT, *_package())
    return {**TOKEN, "PYTHONPATH": ":".join(map(str, paths))}


@contextmanager
def split(folder: Path, first: str) -> Iterator[Split]:
    """Start the server with `first` as the role of the group beside its ingress."""
    with hosts.bed(folder, 2, visible=_package()) as bed:
        made = Split(bed, first)
        made.start_ray()
        made.compute_expected()
        made.start()
        try:
            yield made
        except BaseException:
            print(made.server.log[-10_000:])
            raise
        finally:
            made.server.stop()
