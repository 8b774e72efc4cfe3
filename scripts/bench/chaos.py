"""Kills ranks of a server under load, and compares every stream with that of an undisturbed run.

A fixed set of requests is answered twice by the undisturbed server. A request with two different answers is dropped:
two tokens are so close that the batch, or a cached prefix, decides between them. Then `--streams` clients repeat the
other requests while a random rank gets a signal every few seconds. A stream fails by an error, a missing or a doubled
token, or a wrong usage. The pause of a signal is the time until every stream that was open has its next item.
Run it as scripts/chaos.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from scripts.bench import ROOT
from scripts.bench.results import add_options, origin, save
from scripts.bench.servers import ServerProcess, free_port

CONFIG = ROOT / "configs" / "local.yaml"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LOGPROB_TOLERANCE = 1e-3
"""A token that is computed again in a prompt has another order of additions."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@dataclass
class Answer:
    """A stream as a client sees it; `times` are those of its items."""

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, int] | None = None
    error: str = ""
    times: list[float] = field(default_factory=list)

    def differs(self, other: "Answer") -> str:
        """Return the name of the first part that differs; "" if both are equal."""
        for name in ("error", "texts", "calls", "reasons", "usage"):
            if getattr(self, name) != getattr(other, name):
                return name
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        same = len(self.logprobs) == len(other.logprobs)
        close = all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)
        return "" if same and close else "logprobs"


@dataclass
class Found:
    """The results of the disturbed run."""

    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    signals: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    dropped: int = 0

    def pauses(self) -> list[float]:
        """Return the pause of each signal."""
        longest = []
        for at in self.signals:
            found = [_pause(answer.times, at) for answer in self.answers]
            longest.append(max((pause for pause in found if pause is not None), default=0.0))
        return longest


def _pause(times: list[float], at: float) -> float | None:
    """Return the seconds from `at` to the next item of a stream; None if the stream was not open then."""
    if not times or not times[0] <= at <= times[-1]:
        return None
    return next(time for time in times if time >= at) - at


def requests_of(model: str, count: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (kind, path, body) of `count` requests of all kinds."""
    found = []
    for number in range(count):
        words = f"Number {number}: tell me about ship {number * 7 % 31}."
        common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        common |= {"max_tokens": 120 + 40 * (number % 4), "seed": number}
        chat = common | {"messages": [{"role": "user", "content": words}]}
        plain = common | {"prompt": words, "ignore_eos": True}
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("greedy", plain | {"temperature": 0}),
            ("seeded", plain | {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5}),
            ("logprobs", plain | {"temperature": 0, "logprobs": 2}),
            ("n = 2", plain | {"temperature": 0.8, "n": 2}),
            ("JSON schema", chat | {"temperature": 0.7, "response_format": schema}),
            ("tools", chat | {"temperature": 0.7, "tools": [WEATHER], "tool_choice": "required"}),
            ("chat", chat | {"temperature": 0.7, "ignore_eos": True, "min_tokens": 60}),
        ]
        kind, body = kinds[number % len(kinds)]
        route = "chat/completions" if "messages" in body else "completions"
        found.append((kind, f"/v1/{route}", body))
    return found


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Run one request to its end."""
    answer = Answer()
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.error = f"HTTP {response.status_code}: {(await response.aread())[:300]!r}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(answer, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def _take(answer: Answer, item: dict[str, Any]) -> None:
    answer.times.append(time.monotonic())
    if "error" in item:
        answer.error = json.dumps(item["error"])
    if usage := item.get("usage"):
        answer.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    for choice in item.get("choices", ()):
        index, delta = choice["index"], choice.get("delta", {})
        text = choice.get("text") or delta.get("content") or ""
        answer.texts[index] = answer.texts.get(index, "") + text
        for call in delta.get("tool_calls") or ():
            written = call["function"].get("name", "") + call["function"].get("arguments", "")
            answer.calls[index] = answer.calls.get(index, "") + written
        answer.logprobs += ((choice.get("logprobs") or {}).get("token_logprobs")) or []
        if choice["finish_reason"]:
            answer.reasons[index] = choice["finish_reason"]


async def disturb(options: argparse.Namespace, url: str, pid: int) -> tuple[int, Found]:
    """Answer all requests undisturbed, then under signals. Returns (number of requests, results)."""
    requests, found = requests_of(options.model, options.requests), Found()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=options.timeout_s, limits=limits) as client:
        gate = asyncio.Semaphore(16)

        async def once(path: str, body: dict[str, Any]) -> Answer:
            async with gate:
                return await stream(client, path, body)

        first, expected = [
            await asyncio.gather(*(once(path, body) for _, path, body in requests)) for _ in "ab"
        ]
        broken = [answer.error for answer in expected if answer.error]
        assert not broken, f"the undisturbed run has errors: {broken[0]}"
        pairs = list(zip(requests, first, expected, strict=True))
        requests = [r for r, a, b in pairs if not a.differs(b)]
        expected = [b for _, a, b in pairs if not a.differs(b)]
        found.dropped = len(pairs) - len(requests)
        ended = asyncio.Event()

        async def client_of(number: int) -> None:
            for turn in range(1_000_000):
                at = (number + turn * options.streams) % len(requests)
                kind, path, body = requests[at]
                answer = await stream(client, path, body)
                found.answers.append(answer)
                found.done[kind] += 1
                if part := answer.differs(expected[at]):
                    found.failed.append(f"{kind} {at}: {part}: {answer.error}")
                if ended.is_set():
                    return

        async with asyncio.TaskGroup() as tasks:
            for number in range(options.streams):
                tasks.create_task(client_of(number))
            await send_signals(options, pid, found)
            ended.set()
    return len(requests), found


async def send_signals(options: argparse.Namespace, pid: int, found: Found) -> None:
    """Send a signal to a random rank every few seconds."""
    rng = random.Random(options.seed)
    for number in range(options.signals):
        await asyncio.sleep(options.every_s * rng.uniform(0.5, 1.5))
        while not (ranks := living_ranks(pid)):  # all are being replaced
            await asyncio.sleep(0.1)
        name = options.signal if options.signal != "both" else rng.choice(list(SIGNALS))
        victim = rng.choice(ranks)
        print(f"{number + 1}/{options.signals}: {name} {victim.pid}", file=sys.stderr)
        found.signals.append(time.monotonic())
        victim.send_signal(SIGNALS[name])


def living_ranks(pid: int) -> list[psutil.Process]:
    """Return the processes of the ranks below process `pid`."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RankActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


def report(options: argparse.Namespace, num_requests: int, found: Found) -> dict[str, Any]:
    """Return the results as JSON."""
    pauses = found.pauses() or [0.0]
    return {
        "method": __doc__,
        **origin(0, options.commit, served=True),
        "ranks": options.ranks,
        "streams": options.streams,
        "signal": options.signal,
        "signals": len(found.signals),
        "seconds_between": options.every_s,
        "different_requests": num_requests,
        "requests_without_one_answer": found.dropped,
        "answered": dict(found.done),
        "failed": found.failed,
        "pause_s": {
            "median": round(median(pauses), 2),
            "p99": round(quantiles(pauses, n=100)[98] if len(pauses) > 1 else pauses[0], 2),
            "most": round(max(pauses), 2),
        },
    }


def main() -> None:
    """Command line. Exit code 1 when a stream failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200, help="in flight at once")
    parser.add_argument("--requests", type=int, default=70, help="different requests")
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--signal", choices=[*SIGNALS, "both"], default="kill")
    parser.add_argument("--every-s", type=float, default=5.0, help="between signals, on average")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="setting of the server")
    add_options(parser, "chaos", drawn=False)
    options = parser.parse_args()
    options.model = "demo"
    port = free_port()
    settings = [f"serve.port={port}", f"cluster.ranks={options.ranks}", *options.set]
    settings += ["cluster.rebuild_attempts=20", "model.max_model_len=1024", "cache.num_blocks=4096"]
    command = [sys.executable, "-m", "cluster.cli", "serve", str(CONFIG)]
    command += [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="phalanx-chaos-") as folder:
        server = ServerProcess(command, port, options.model, Path(folder) / "log")
        try:
            num_requests, found = asyncio.run(disturb(options, server.url, server.pid))
        finally:
            server.stop()
    results = report(options, num_requests, found)
    save(options.out, results)
    print(json.dumps({key: results[key] for key in ("answered", "failed", "pause_s")}, indent=1))
    sys.exit(1 if found.failed else 0)


if __name__ == "__main__":
    main()
