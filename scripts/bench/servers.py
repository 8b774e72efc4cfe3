"""Starts and stops the servers that bench_local compares, and looks at their processes."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from scripts.bench import ROOT

MEGABYTE = 1e6
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05


class ServerProcess:
    """A server in a process of its own, which answers as soon as the constructor returns.

    `start_s` counts from the command to the first generated answer.
    """

    def __init__(
        self,
        command: list[str],
        port: int,
        model: str,
        log: Path,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._model, self._start_timeout_s = model, start_timeout_s
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        started = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        try:
            while not self._answers():
                self._check_alive(time.perf_counter() - started)
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started

    @property
    def pid(self) -> int:
        """Of the process that the command started."""
        return self._process.pid

    def stop(self) -> float | None:
        """Press Ctrl-C; seconds until it and all that it started is gone, None if that took too long.

        What is left after STOP_TIMEOUT_S is killed.
        """
        started = time.perf_counter()
        if self._process.poll() is not None:
            return None
        family = self._family()
        self._process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        seconds = time.perf_counter() - started
        for process in alive:
            process.kill()
        self._process.wait()
        return None if alive else seconds

    def rank_memory(self, weight_bytes: list[int], kv_bytes: list[int]) -> list[dict[str, float]]:
        """Resident memory of each rank actor in MB, and what is left of it without weights.

        The KV cache is reserved whole but resident only where it was written, so it is not taken off:
        `beyond_weights` is an upper bound of what lies beyond weights and cache.
        """
        ranks = [p for p in self._family() if "RankActor" in " ".join(p.cmdline())]
        figures = []
        for process, weights, kv in zip(ranks, weight_bytes, kv_bytes, strict=True):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            kilobytes = {line.split(":")[0]: line.split()[1] for line in rollup[1:]}
            rss, pss = (int(kilobytes[key]) * 1024 for key in ("Rss", "Pss"))
            row = {
                "rss": rss,
                "pss": pss,
                "weights": weights,
                "kv_reserved": kv,
                "beyond_weights": rss - weights,
            }
            figures.append({key: round(value / MEGABYTE, 1) for key, value in row.items()})
        return figures

    def first_rank(self) -> tuple[int, float]:
        """Tokens that Phalanx's rank 0 has generated, and seconds it has spent in steps."""
        with urllib.request.urlopen(f"{self.url}/ranks", timeout=10) as answer:
            rank = json.load(answer)["ranks"][0]
        return rank["generation_tokens"], sum(rank["step_seconds"].values())

    def idle_cpu_percent(self, seconds: float = 10.0) -> dict[str, float]:
        """Share of one core that the server takes with nothing to do: its ranks, and all of it."""
        before, started = self._cpu_seconds(), time.perf_counter()
        time.sleep(seconds)
        after, elapsed = self._cpu_seconds(), time.perf_counter() - started
        spent = {pid: after[pid][1] - before[pid][1] for pid in before.keys() & after.keys()}
        ranks = sum(spent[pid] for pid in spent if "RankActor" in after[pid][0])
        return {
            "ranks": round(100 * ranks / elapsed, 2),
            "all_processes": round(100 * sum(spent.values()) / elapsed, 2),
        }

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _cpu_seconds(self) -> dict[int, tuple[str, float]]:
        figures = {}
        for process in self._family():
            times = process.cpu_times()
            figures[process.pid] = (" ".join(process.cmdline()), times.user + times.system)
        return figures

    def _answers(self) -> bool:
        body = {"model": self._model, "prompt": "hello", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._start_timeout_s) as answer:
                return bool(json.load(answer)["choices"])
        except urllib.error.HTTPError as error:
            if error.code in (404, 502, 503):  # a proxy is there, the application not yet
                return False
            raise RuntimeError(f"HTTP {error.code}: {error.read(500).decode()}") from error
        except OSError:
            return False

    def _check_alive(self, waited_s: float) -> None:
        if self._process.poll() is None and waited_s < self._start_timeout_s:
            return
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"no answer after {waited_s:.0f} s; the server said:\n{tail}")


def free_port() -> int:
    """A port that was free a moment ago, below those that the system hands out by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def phalanx_command(config: Path, port: int, settings: list[str]) -> list[str]:
    """scripts/serve, as a person starts it."""
    overrides = [f"serve.port={port}", *settings]
    options = [part for setting in overrides for part in ("--set", setting)]
    return [str(ROOT / "scripts" / "serve"), str(config), *options]


def transformers_command(python: Path, checkpoint: Path, port: int) -> list[str]:
    """`transformers serve` with the settings under which it is fast on a CPU."""
    options = "--continuous-batching --attn-implementation sdpa --cb-num-blocks 256"
    options += " --cb-max-batch-tokens 256 --device cpu --dtype auto"
    command = [str(python.with_name("transformers")), "serve", str(checkpoint), *options.split()]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def phalanx(command: str, config: Path, settings: list[str], *options: str) -> list[str]:
    """A command line of this installation."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "cluster.cli", command, str(config), *options, *overrides]


def resolved(config: Path, settings: list[str]) -> dict[str, Any]:
    """Return the figures of `phalanx check --json`; a wrong configuration ends the command with its problems."""
    command = phalanx("check", config, settings, "--json")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    found: dict[str, Any] = json.loads(done.stdout)
    return found
