"""Pauses of streams after failures of ranks, with the time of each stage; for GPUs and the shapes of a real model.

Each server keeps `--streams` requests in flight. A failure begins when all streams have tokens; its pause is the time
until every stream that was open goes on. An answer fails by an error or another number of tokens than it
asked for; scripts/chaos compares texts. The servers:

plain    commit: a rank fails in a step and keeps its process. kill: SIGKILL. stop: SIGSTOP
standby  SIGKILL with a standby rank, on one rank fewer if the GPUs do not suffice
shrink   SIGKILL while no new process starts: the group goes on with fewer ranks, and grows when processes start again

A dry run on a CPU:

    python -m scripts.bench.recovery --config configs/local.yaml --ranks 2 --streams 8 --output-len 200 \\
        --set cluster.device=cpu --out /tmp/recovery
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.bench import loop, machine
from cluster.bench.load import Driver, Round
from cluster.bench.settings import Load
from cluster.config.load import load_config
from scripts.bench import ROOT, results
from scripts.bench.chaos import HOOKS
from scripts.bench.chaos_faults import FAULTS, Failure, serves, watch
from scripts.bench.chaos_victim import Victim
from scripts.bench.inputs import names_of
from scripts.bench.servers import ServerProcess, free_port

FIRST_TOKENS = 8  # of each stream, before a failure
POLL_S = 0.05
TIMEOUT_S = 300.0
IDLE_S = 3.0
"""Time without processor time after which a new standby has loaded."""
GROWN_S = 120.0
NO_START = "no-start"


@dataclass
class Bench:
    """One server under load.

    standbys    processes beside the ranks
    """

    options: argparse.Namespace
    victim: Victim
    answers: Round
    standbys: int = 0

    async def flowing(self, since: float = 0.0) -> None:
        """Return when every stream in flight has FIRST_TOKENS tokens, and one after `since`."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            opened = [answer for answer in self.answers.answers if not answer.ended]
            moving = [
                answer
                for answer in opened
                if len(answer.chunk_times) >= FIRST_TOKENS and answer.chunk_times[-1] > since
            ]
            if len(moving) >= 0.9 * self.options.streams:
                return
            assert time.monotonic() < deadline, f"{len(moving)} of {len(opened)} streams go on"
            await asyncio.sleep(POLL_S)

    def pause(self, at: float) -> tuple[float, int]:
        """Return the time after `at` until every stream that was open goes on, and their number.

        A stream goes on at the end of its longest gap, because tokens of before may arrive a little later.
        """
        ends = []
        for answer in self.answers.answers:
            times = answer.chunk_times
            if times and times[0] <= at <= times[-1]:
                after = [at, *(moment for moment in times if moment > at)]
                gaps = pairwise(after)
                ends.append(max(gaps, key=lambda gap: gap[1] - gap[0])[1])
        return max(ends, default=at) - at, len(ends)

    def longest_gap(self, since: float) -> float:
        """Return the longest time between two tokens of a stream, of those after `since`."""
        gaps = [
            later - earlier
            for answer in self.answers.answers
            for earlier, later in pairwise(answer.chunk_times)
            if earlier >= since
        ]
        return max(gaps, default=0.0)

    async def fail(self, kind: str) -> dict[str, Any]:
        """Cause a failure, and return its times when the streams flow again."""
        await self.victim.wait_group(serves)
        await self.flowing(time.monotonic())
        _, before = self.victim.group()
        failure = Failure(kind, time.monotonic())
        watching = asyncio.create_task(watch(self.victim, failure, before))
        if kind == "kill":
            await kill_oldest(self.victim)
        else:
            happened = await FAULTS[kind](self.victim, random.Random(0))
            if happened is not None:
                await watching
                failure.count_from(happened)
        await watching
        await self.flowing(time.monotonic())
        pause_s, streams = self.pause(failure.at)
        found = {
            "failure": kind,
            "pause_s": round(pause_s, 3),
            "streams": streams,
            "detected_s": rounded(failure.detected_s),
            "serving_s": rounded(failure.serving_s),
            "stages_s": failure.stages,
        }
        print(found, file=sys.stderr, flush=True)
        return found

    async def standbys_ready(self) -> None:
        """Return when the processes of all standbys have loaded."""
        wanted = self.victim.num_ranks + self.standbys
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := oldest_first(self.victim)) < wanted:
            assert time.monotonic() < deadline, f"{len(found)} of {wanted} processes"
            await asyncio.sleep(POLL_S)
        for process in found[self.victim.num_ranks :]:
            spent = -1.0
            while (now := sum(process.cpu_times()[:2])) - spent > 0.1 * IDLE_S:
                spent = now
                await asyncio.sleep(IDLE_S)


async def kill_oldest(victim: Victim) -> None:
    """SIGKILL of the oldest rank process, which is no standby."""
    oldest_first(victim)[0].kill()


def oldest_first(victim: Victim) -> list[psutil.Process]:
    """Return the processes of ranks and standbys."""
    return sorted(victim.processes("RankActor"), key=psutil.Process.create_time)


def rounded(seconds: float | None) -> float | None:
    """Return milliseconds' precision."""
    return None if seconds is None else round(seconds, 3)


async def plain(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    """Failures of ranks that are replaced or go on."""
    for kind in bench.options.faults:
        yield await bench.fail(kind)


async def standby(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    """SIGKILL when a standby has loaded."""
    await bench.standbys_ready()
    yield await bench.fail("kill")


async def shrink(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    """SIGKILL when no new process starts, and growth when processes start again."""
    block = Path(os.environ["PHALANX_FAULTS"]) / NO_START
    block.touch()
    yield {**await bench.fail("kill"), "failure": "kill, then fewer ranks"}
    before, since = bench.victim.group()[1], time.monotonic()
    block.unlink()
    deadline = since + GROWN_S

    def grown(state: str, epoch: int) -> bool:
        return (serves(state, epoch) and epoch > before) or time.monotonic() > deadline

    await bench.victim.wait_group(grown)
    await bench.flowing(time.monotonic())
    yield {
        "failure": "growth",
        "pause_s": round(bench.longest_gap(since), 3),
        "serving_s": round(time.monotonic() - since, 3),
        "stages_s": await bench.victim.stages(),
        "ranks": len(bench.victim.processes("RankActor")),
    }


SERVERS = {"plain": plain, "standby": standby, "shrink": shrink}


def settings_of(name: str, options: argparse.Namespace) -> tuple[list[str], int, int]:
    """Return the settings of a server, its ranks and its standbys."""
    ranks, standbys = options.ranks, int(name == "standby")
    num_gpus = len(machine.hardware()["gpus"])
    if standbys and num_gpus and ranks + standbys > num_gpus:
        ranks -= 1
    settings = [f"cluster.ranks={ranks}", "cluster.rebuild_attempts=10"]
    settings += ["cache.prefix_caching=true", f"cluster.standby_ranks={standbys}"]
    return settings + ["cluster.shrink=true"] * (name == "shrink"), ranks, standbys


def load_of(options: argparse.Namespace) -> Load:
    """Return the load: `--streams` requests in flight."""
    return Load(
        endpoint="completions",
        requests=options.streams * 40,
        concurrency=options.streams,
        input_len=options.input_len,
        output_len=options.output_len,
        warmup=0,
        rounds=1,
        seed=0,
        temperature=0.0,
        ignore_eos=True,
        prompts="ids",
        vocab_size=256,
        timeout_s=TIMEOUT_S,
    )


async def measure(
    name: str,
    options: argparse.Namespace,
    server: ServerProcess,
    folder: Path,
    found: Callable[[dict[str, Any]], None],
) -> None:
    """Run the failures of one server; `found` gets each when it has passed."""
    _, ranks, standbys = settings_of(name, options)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        victim = Victim(server.pid, folder / "log", client, folder, ranks)
        load, answers = load_of(options), Round()
        driver = Driver(load, {})
        (target,) = await driver.prepare({"phalanx": server.url}, None)
        playing = asyncio.create_task(driver.play(target, 0, load.requests, answers))
        bench = Bench(options, victim, answers, standbys)
        try:
            async for failure in SERVERS[name](bench):
                found(failure)
        finally:
            playing.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await playing
        ended = [answer for answer in answers.answers if answer.ended]
        wrong = [
            answer.error or f"{answer.completion_tokens} tokens"
            for answer in ended
            if answer.error or answer.completion_tokens != options.output_len
        ]
        found({"answers": len(ended), "failed": wrong[:10], "num_failed": len(wrong)})


def serve(name: str, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Start a server, measure it, stop it; the report is saved after each failure."""
    settings = [*settings_of(name, options)[0], *options.set]
    own: dict[str, Any] = {"settings": settings, "failures": []}
    report["servers"][name] = own

    def found(entry: dict[str, Any]) -> None:
        own["failures"].append(entry) if "failure" in entry else own.update(entry)
        results.save(options.out, report)

    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as folder_name:
        folder, port = Path(folder_name), free_port()
        os.environ["PHALANX_FAULTS"] = folder_name
        command = [sys.executable, "-m", "cluster.cli", "serve", str(options.config)]
        for setting in (f"serve.port={port}", *settings):
            command += ["--set", setting]
        log = folder / "log"
        server = None
        try:
            model = load_config(options.config, settings).serve.model_name
            server = ServerProcess(command, port, model, log, options.start_timeout_s)
            found({"start_to_first_answer_s": round(server.start_s, 2)})
            loop.run(measure(name, options, server, folder, found))
        except Exception as error:  # the other servers are measured nevertheless
            found({"error": f"{type(error).__name__}: {error}"[:2000]})
            print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
        finally:
            if server is not None:
                server.stop()
            if options.logs is not None:
                text = log.read_text(errors="replace")
                options.logs.with_name(f"{options.logs.name}-{name}.log").write_text(
                    text[-200_000:]
                )


def main() -> None:
    """Command line. Exit code 1 when an answer or a server failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, help="default: the GPUs that are here")
    parser.add_argument("--servers", type=names_of(SERVERS), default=list(SERVERS))
    parser.add_argument("--faults", type=names_of(FAULTS), default=["commit", "kill", "stop"])
    parser.add_argument("--streams", type=int, default=128, help="requests in flight")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--set", action="append", default=[], help="setting of every server")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no server starts later")
    parser.add_argument("--logs", type=Path, help="keep the servers' outputs here: PATH-NAME.log")
    results.add_options(parser, "gpu-recovery", drawn=False)
    options = parser.parse_args()
    gpus = machine.hardware()["gpus"]
    options.ranks = options.ranks or len(gpus)
    if not options.ranks:
        parser.error("no GPU was found; --ranks sets the number of ranks")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HOOKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    began = time.monotonic()
    num_gpus = min(len(gpus), options.ranks)
    report = {"method": __doc__, **results.origin(num_gpus, options.commit, served=True)}
    report |= {"streams": options.streams, "servers": {}}
    report |= {"input_len": options.input_len, "output_len": options.output_len}
    for name in options.servers:
        if time.monotonic() - began < options.limit_s:
            serve(name, options, report)
    servers = report["servers"].values()
    sys.exit(any("error" in server or server.get("num_failed") for server in servers))


if __name__ == "__main__":
    main()
