"""A server in a process of its own, as `phalanx serve` starts it: the engine of kind http."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cluster.bench.bodies import Target
from cluster.bench.load import Driver, Round
from cluster.bench.loop import run
from cluster.config.api_keys import VARIABLE, read_keys_file, read_variable
from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments.planned_load import TIMEOUT_S
from cluster.experiments.target import Engine, EngineError, Job, Measured
from cluster.experiments.workload_section import RequestWorkload

POLL_S = 0.1
STOP_S = 20.0
READY_TIMEOUT_S = 5.0
WATCH_S = 2.0
"""Time between two looks at the state of the ranks during a run."""
PROGRAM = """import signal
from cluster.experiments.parent_death import stop_with_parent
stop_with_parent({parent}, signal.SIGINT)
from cluster.cli import main
main()"""
LOG_TAIL = 2000  # characters of a server's log in an error


class ServerClient:
    """Loads a server, and reads the statistics of its ranks."""

    def __init__(self, url: str, model: str, headers: dict[str, str]):
        self._url, self._model, self._headers = url, model, headers

    def is_ready(self) -> bool:
        """Whether every rank can answer."""
        with suppress(OSError), self._get("/ready") as answer:
            ready: bool = answer.status == 200
            return ready
        return False

    def run(self, job: Job, timeout_s: float) -> Measured:
        """Send a load to its end. Raises EngineError."""
        before = self._ranks()
        round_ = Round()
        try:
            run(self._send_watched(job, round_, timeout_s))
        except TimeoutError:
            raise EngineError(f"the requests took longer than {timeout_s:g} s") from None
        after = self._ranks()
        check_epochs(before, after)
        return Measured(round_.answers, _figures(before, after), round_.client_cpu_s)

    async def _send_watched(self, job: Job, into: Round, timeout_s: float) -> None:
        """Send a load. Raises TimeoutError after `timeout_s`.

        Raises EngineError when a rank is lost, because figures with the pause are of no use.
        """
        tasks = [asyncio.create_task(work) for work in (self._send(job, into), self._watch())]
        try:
            async with asyncio.timeout(timeout_s):
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Raise EngineError when a group does not serve."""
        while True:
            await asyncio.sleep(WATCH_S)
            for group in await asyncio.to_thread(self._groups):
                if group["state"] != "serving":
                    raise EngineError(
                        f"a rank was lost in the run; {group['error'] or 'no reason'}"
                    )

    def _groups(self) -> list[dict[str, Any]]:
        """Return the states of the groups; [] if nothing answers."""
        try:
            with self._get("/ready") as answer:
                text = answer.read()
        except urllib.error.HTTPError as refused:
            with refused:
                text = refused.read()
        except OSError:
            return []
        try:
            groups: list[dict[str, Any]] = json.loads(text)["groups"]
        except (ValueError, KeyError, TypeError):
            return []
        return groups

    async def _send(self, job: Job, into: Round) -> None:
        load, workload = job.load, job.workload
        assert load is not None and isinstance(workload, RequestWorkload)
        settings = replace(workload.load(job.seed, TIMEOUT_S, job.salt), concurrency=load.in_flight)
        driver = Driver(settings, self._headers)
        target = Target(
            name="server", url=self._url, model=self._model, ignore_eos=settings.ignore_eos
        )
        await driver.send(target, load.requests, load.offsets, into)

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self._url}{path}", headers=self._headers)
        return urllib.request.urlopen(request, timeout=READY_TIMEOUT_S)

    def _ranks(self) -> list[dict[str, Any]]:
        """Return the statistics of each rank."""
        try:
            with self._get("/ranks") as answer:
                ranks: list[dict[str, Any]] = json.load(answer)["ranks"]
                return ranks
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(f"the server does not answer: {error}") from error


class Server(Engine):
    """A ready server on a free port of this machine; its address in the configuration is ignored."""

    def __init__(self, config: PhalanxConfig, folder: Path, start_s: float):
        port = _free_port()
        config = on_port(config, port)
        self._url = f"http://127.0.0.1:{port}"
        self._client = ServerClient(self._url, str(config.serve.model_name), _headers(config))
        self.logs = [folder / "server.log"]
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        # With this process's sys.path: -m would import from the current folder first.
        program = f"import sys; sys.path[:] = {sys.path!r}\n{PROGRAM.format(parent=os.getpid())}"
        with self.logs[0].open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, "serve", str(path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        try:
            self._wait_ready(start_s)
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, Any]:
        """Return the address of the server."""
        return {"url": self._url}

    def run(self, job: Job, timeout_s: float) -> Measured:
        try:
            measured = self._client.run(job, timeout_s)
        except EngineError:
            self._check_alive()
            raise
        self._check_alive()
        return measured

    def close(self) -> None:
        """Stop the server as Ctrl-C does; kill its session if that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except BaseException as problem:  # too long, or a second Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise

    def _wait_ready(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while not self._client.is_ready():
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"the server was not ready after {start_s:g} s{self._tail()}")
            time.sleep(POLL_S)

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise EngineError(f"the server ended with exit code {code}{self._tail()}")

    def _tail(self) -> str:
        text = self.logs[0].read_text(errors="replace")[-LOG_TAIL:].strip()
        return f"; its log ends with:\n{text}" if text else ""


def on_port(config: PhalanxConfig, port: int) -> PhalanxConfig:
    """Return the configuration of a server of this machine, with an application name of its own.

    A Ray cluster may have another server with the configured name; the experiment must not use that server.
    """
    name = f"{config.serve.app_name}-experiment-{uuid.uuid4().hex[:8]}"
    # Figures of a round must not be of the moment before its end.
    own = {"port": port, "host": "127.0.0.1", "app_name": name, "stats_fresh_s": 0.0}
    return config.model_copy(update={"serve": config.serve.model_copy(update=own)})


def check_epochs(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    """Raise EngineError if the group lost a rank between two answers of /ranks: its figures have a pause."""
    old, new = ([rank["epoch"] for rank in ranks] for ranks in (before, after))
    if old != new:
        raise EngineError(
            f"a rank was lost in the run, and the group was rebuilt (epoch {max(old)} to {max(new)}); "
            "the figures have the pause. The log of the server has the reason"
        )


def _figures(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, float]:
    """Return what the ranks did between two answers of /ranks."""

    def grown(rank: int, part: str) -> float:
        return float(after[rank]["step_seconds"][part] - before[rank]["step_seconds"][part])

    figures: dict[str, float] = {}
    parts = after[0].get("step_seconds", {}) if after else {}
    seconds = {part: sum(grown(rank, part) for rank in range(len(after))) for part in parts}
    total = sum(seconds.values())
    if total > 0:
        figures["vote_share"] = seconds.get("vote", 0.0) / total
        figures["forward_share"] = seconds.get("forward", 0.0) / total
    return figures


def _headers(config: PhalanxConfig) -> dict[str, str]:
    """Return the headers with a key, if the server wants one."""
    keys = read_variable() if VARIABLE in os.environ else []
    if config.serve.api_keys_file is not None:
        keys += read_keys_file(config.serve.api_keys_file)
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
