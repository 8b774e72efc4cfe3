"""A soak of 0.3 s against a server that only answers: from the undisturbed answers to the figures and the page."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench import chaos
from scripts.bench.soak import soak
from scripts.bench.soak_curve import page


class Answers:
    """An HTTP server. `lost`: streams that lack a token from the second failure on; `running`: requests of its rank."""

    def __init__(self, folder: Path, lost: bool, running: int):
        self._folder, self._lost, self._running = folder, lost, running

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (line for line in head.splitlines() if "ontent-" in line and "ength" in line), "0"
        )
        body = await reader.readexactly(int(length.rpartition(" ")[2]))
        if "/ranks" in head:
            answer = json.dumps({"ranks": [{"rank": 0, "running": self._running, "waiting": 0}]})
        else:
            answer = self._answer(json.loads(body))
        lines = [
            "HTTP/1.1 200 OK",
            f"content-length: {len(answer)}",
            "connection: close",
            "",
            answer,
        ]
        writer.write("\r\n".join(lines).encode())
        writer.close()

    def _answer(self, body: dict[str, Any]) -> str:
        text = f"{body['seed']} abc"
        if self._lost and "cache_salt" not in body:
            text = text[:-1]
        if not body.get("stream"):
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            return json.dumps(
                {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}
            )
        items = [{"index": 0, "text": letter, "finish_reason": None} for letter in text]
        items[-1]["finish_reason"] = "length"
        lines = [f"data: {json.dumps({'choices': [item]})}\n\n" for item in items]
        return "".join(lines) + "data: [DONE]\n\n"


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, lost: bool = False, running: int = 0
) -> dict:
    """The results of 0.3 s of traffic with failures of a kind that does nothing."""
    monkeypatch.setattr("scripts.bench.chaos_faults.DELAYED_S", 0.05)
    monkeypatch.setattr("scripts.bench.soak_curve.SAMPLE_S", 0.05)
    monkeypatch.setattr("scripts.bench.soak_traffic.PAUSE_S", 0.02)
    monkeypatch.setattr("scripts.bench.soak.QUIET_S", 0.0)
    (folder / "log").touch()
    words = "--requests 9 --streams 4 --faults delay --every-s 0.1 --ranks 1"
    options = chaos.parse(["--soak", f"{0.3 / 3600}", *words.split()])
    options.app_name = "none"

    async def scenario() -> dict[str, Any]:
        async with await asyncio.start_server(
            Answers(folder, lost, running), "127.0.0.1", 0
        ) as server:
            port = server.sockets[0].getsockname()[1]
            own = SimpleNamespace(pid=os.getpid(), url=f"http://127.0.0.1:{port}")
            return await soak(options, own, folder)  # type: ignore[arg-type]

    return asyncio.run(scenario())


def test_a_soak_compares_answers_and_has_a_curve(tmp_path, monkeypatch) -> None:
    found = run(tmp_path, monkeypatch)
    assert found["failed"] == [] and found["rounding"] == []
    assert sum(found["answered"].values()) + found["clients_left"] >= 4
    assert found["failures"]["delay"]["count"] >= 1
    columns, samples = found["curve"]["columns"], found["curve"]["samples"]
    last = dict(zip(columns, samples[-1], strict=True))
    assert last["answers"] == sum(found["answered"].values())
    origin = {"hardware": "CPU", "versions": {"python": "3"}, "date": "2026-01-01"}
    options = {"ranks": 1, "streams": 4, "seconds_between": 0.2}
    assert "| 0 to 0 |" in page(found | origin | options, "soak")


def test_a_lost_token_and_a_request_without_client_fail(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("scripts.bench.chaos_judge.TRIES", 1)
    monkeypatch.setattr("scripts.bench.chaos_judge.AT_ONCE", 1)
    monkeypatch.setattr("scripts.bench.soak_traffic.LEAVING", 0)
    found = run(tmp_path, monkeypatch, lost=True, running=2)
    assert found["failed"][0] == "requests without clients, by rank: {0: 2}"
    assert len(found["failed"]) > 4 and all("texts" in text for text in found["failed"][1:])
