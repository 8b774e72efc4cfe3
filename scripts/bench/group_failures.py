"""Pauses of streams when the ranks of a prefill group, a decode group or both are killed, with the stages of rebuilds.

A server has a prefill and a decode group of one rank each on one node. When every stream has FIRST_TOKENS tokens, the
ranks are killed. The pause of a stream is its longest time between two tokens from then on. `--idle-s` before each
failure the groups serve again, so that a spare process for the next rank may have started. Answers are compared with
those before the failures. The servers:

plain    for each of `--rounds`: decode, prefill, both
standby  both, with a standby rank of each group

    python -m scripts.bench.group_failures --set model.path=configs/models/demo
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.bench import loop
from cluster.config.load import load_config
from scripts.bench import results
from scripts.bench.kv_kill import flowing, pause, summary
from scripts.bench.kv_streams import Stream, ask
from scripts.bench.servers import ServerProcess, free_port

ROLES = ("prefill", "decode")
SETTINGS = (
    *("cluster.ranks=2", "cluster.device=cpu", "model.max_model_len=2048"),
    *("cache.host_memory_gib=0.25", "pool=[{role: prefill, ranks: 1}, {role: decode, ranks: 1}]"),
)
TIMEOUT_S = 300.0
POLL_S = 0.02
BUSY_S = 0.3
"""Seconds in which the decode rank takes more processor time than the prefill rank, which has no prompts."""


def ranks_of(server_pid: int) -> list[psutil.Process]:
    """Return the processes of ranks and standbys, oldest first."""
    family = psutil.Process(server_pid).children(recursive=True)
    found = [process for process in family if "RankActor" in " ".join(process.cmdline())]
    return sorted(found, key=psutil.Process.create_time)


async def victims(server_pid: int, killed: str) -> list[psutil.Process]:
    """Return the ranks of the groups to kill, while streams flow. Standbys are younger than ranks."""
    ranks = ranks_of(server_pid)[:2]
    if killed == "both":
        return ranks
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    await asyncio.sleep(BUSY_S)
    spent = [sum(rank.cpu_times()[:2]) - then for rank, then in zip(ranks, before, strict=True)]
    decode = spent.index(max(spent))
    return [ranks[decode if killed == "decode" else 1 - decode]]


class Bench:
    """The failures of one server, one after another."""

    def __init__(
        self, options: argparse.Namespace, client: httpx.AsyncClient, model: str, pid: int
    ):
        self._options, self._client, self._model, self._pid = options, client, model, pid
        chance = random.Random(0)
        self._prompts = [
            chance.choices(range(1, 256), k=options.input_len) for _ in range(options.streams)
        ]
        self._expected: list[list[int]] = []

    async def run(self, kinds: Sequence[str], standbys: int) -> list[dict[str, Any]]:
        """Return the figures of each failure."""
        streams = [Stream() for _ in self._prompts]
        await self._ask(streams)
        self._expected = [stream.tokens for stream in streams]
        found = []
        for killed in kinds:
            await self._serving()
            await asyncio.sleep(self._options.idle_s)
            assert len(ranks_of(self._pid)) == 2 * (1 + standbys), "a process is missing"
            found.append(await self._kill(killed))
            print(found[-1], file=sys.stderr, flush=True)
        return found

    async def _kill(self, killed: str) -> dict[str, Any]:
        before = {group["role"]: group["rebuilds"] for group in await self._groups()}
        streams = [Stream() for _ in self._prompts]
        asked = asyncio.ensure_future(self._ask(streams))
        await flowing(streams, asked)
        ranks = await victims(self._pid, killed)
        open_now = [stream for stream in streams if not stream.complete]
        for rank in ranks:
            rank.kill()
        at = time.monotonic()
        await asked
        after = {group["role"]: group for group in await self._serving()}
        failed = ROLES if killed == "both" else (killed,)
        assert all(after[role]["rebuilds"] == before[role] + (role in failed) for role in ROLES)
        equal = sum(
            stream.tokens == tokens for stream, tokens in zip(streams, self._expected, strict=True)
        )
        return {
            "killed": killed,
            **summary([pause(stream, at) for stream in open_now]),
            "equal_answers": f"{equal} of {len(streams)}",
            "rebuilds": {
                role: {key: after[role]["last_rebuild"][key] for key in ("seconds", "stages")}
                for role in failed
            },
        }

    async def _ask(self, streams: list[Stream]) -> list[Stream]:
        length = self._options.output_len
        asked = (
            ask(self._client, self._model, prompt, length, found=stream)
            for prompt, stream in zip(self._prompts, streams, strict=True)
        )
        return await asyncio.gather(*asked)

    async def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = (await self._client.get("/ready")).json()["groups"]
        return groups

    async def _serving(self) -> list[dict[str, Any]]:
        """Return the groups as soon as all serve."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            groups = await self._groups()
            if all(group["state"] == "serving" for group in groups):
                return groups
            assert time.monotonic() < deadline, groups
            await asyncio.sleep(POLL_S)


def serve(options: argparse.Namespace, standbys: int) -> list[dict[str, Any]]:
    """Start a server, measure it, stop it."""
    kinds = ["both"] if standbys else ["decode", "prefill", "both"] * options.rounds
    settings = [*SETTINGS, f"cluster.standby_ranks={standbys}", *options.set]

    async def measure(server: ServerProcess) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
            return await Bench(options, client, model, server.pid).run(kinds, standbys)

    with tempfile.TemporaryDirectory(prefix="phalanx-groups-") as folder:
        port, log = free_port(), Path(folder) / "log"
        command = [sys.executable, "-m", "cluster.cli", "serve", str(options.config)]
        for setting in (f"serve.port={port}", *settings):
            command += ["--set", setting]
        model = load_config(options.config, settings).serve.model_name or ""
        server = ServerProcess(command, port, model, log)
        try:
            return loop.run(measure(server))
        except BaseException:
            print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
            raise
        finally:
            server.stop()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=600)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--set", action="append", default=[], help="setting of every server")
    results.add_options(parser, "cpu-group-failures", drawn=False)
    options = parser.parse_args()
    report = {"method": __doc__, **results.origin(0, options.commit, served=True)}
    report["options"] = {key: str(value) for key, value in vars(options).items() if key != "out"}
    report["servers"] = {}
    for name, standbys in (("plain", 0), ("standby", 1)):
        report["servers"][name] = serve(options, standbys)
        results.save(options.out, report)


if __name__ == "__main__":
    main()
