"""Ranks without HTTP: `LLM` and `phalanx batch` answer as a server does, Ctrl-C loses nothing, and no process stays."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.server import (
    ROOT,
    START_TIMEOUT_S,
    Server,
    free_port,
    left_running,
    write_config,
)

MARK = "PHALANX_TEST_MARK"  # a variable that all descendants of a process inherit
NUM_SHORT, NUM_LINES, SHORT, LONG = 8, 11, 8, 400
ENDLESS = {"max_tokens": 480, "n": 16}  # minutes, where a rank runs few sequences at once
# Ray's own lines, such as a warning of a busy machine: "[2026-11-23 10:00:00,000 W 1 2] ..." and "(raylet) ...".
OF_RAY = re.compile(
    r"\[[-0-9]+ [:0-9,]+ [IWE] [ 0-9]+\]|\((raylet|autoscaler|pid=|Ray)|[-0-9]+ [:0-9,]+\t\w+ \w+\.py:"
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
PYTHON = """
import json, sys
from cluster.offline import LLM
with LLM(sys.argv[1], progress=False, **{"scheduler.max_num_seqs": 4}) as llm:
    fields = {"max_tokens": 24, "temperature": 0.8}
    answers = llm.generate(["a", "", [1, 2, 3]], [{"seed": i} for i in range(3)], **fields)
    answers += llm.chat([{"role": "user", "content": "hello"}], max_tokens=24, seed=3)
print(json.dumps([answer.body for answer in answers]))
"""


class Run:
    """A process with a marked environment."""

    def __init__(self, *command: str):
        self._mark = uuid.uuid4().hex
        environment = os.environ | {MARK: self._mark}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, output and errors. Fails if a process is left."""
        try:
            output, errors = self.process.communicate(timeout=START_TIMEOUT_S)
        finally:
            self.process.kill()
        alive = left_running(self._left(), 30)
        for process in alive:
            process.kill()
        assert not alive, [process.cmdline() for process in alive]
        return self.process.returncode, output, errors

    def _left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def run_batch(*options: Any) -> Run:
    return Run("-m", "cluster.cli", "batch", *map(str, options))


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without the fields that no two answers have in common."""
    cached = {"prompt_tokens_details": None}
    return body | {"id": None, "created": None, "usage": body["usage"] | cached}


def results(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({item["custom_id"] for item in found}) == len(found)
    return {item["custom_id"]: item for item in found}


@pytest.fixture
def config(tmp_path: Path, checkpoint: Path) -> Path:
    return write_config(tmp_path, checkpoint, free_port())


def test_llm_answers_as_http(
    server: Server, ray_address: str, tmp_path: Path, checkpoint: Path
) -> None:
    """In the Ray of a server that goes on. The batch below starts and ends a Ray of its own."""
    before = server.actors()
    cluster = {"ranks": 1, "ray_address": ray_address}
    config = write_config(tmp_path, checkpoint, free_port(), cluster=cluster)
    run = Run("-c", PYTHON, str(config))
    code, output, errors = run.end()
    assert code == 0, errors
    assert not [line for line in errors.splitlines() if not OF_RAY.match(line)], errors
    assert not left_running([actor for actor in server.actors() if actor not in before], 30)
    found = json.loads(output.splitlines()[-1])
    fields = {"max_tokens": 24, "temperature": 0.8}
    for body, seed, prompt in ((found[0], 0, "a"), (found[2], 2, [1, 2, 3])):
        expected = server.post(COMPLETIONS, json={"prompt": prompt, "seed": seed, **fields}).json()
        assert plain(body) == plain(expected)
        assert body["choices"][0]["text"]
    assert found[1] == {}  # the empty prompt
    chat = {"messages": USER, "max_tokens": 24, "seed": 3}
    assert plain(found[3]) == plain(server.post(CHAT, json=chat).json())


def requests(path: Path, *, endless: bool) -> Path:
    """Short answers first, then long ones and a bad one; or endless ones in their place."""
    lines = []
    for i in range(NUM_LINES - 1):
        more = ENDLESS if endless else {"max_tokens": LONG}
        tokens = {"max_tokens": SHORT} if i < NUM_SHORT else more
        body = {"prompt": f"{i}", **tokens, "ignore_eos": True, "seed": i}
        lines.append({"custom_id": f"c{i}", "method": "POST", "url": COMPLETIONS, "body": body})
    bad = lines[-1]["body"] if endless else {}
    lines.append({"custom_id": "bad", "method": "POST", "url": COMPLETIONS, "body": bad})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.exhaustive
def test_a_batch_after_ctrl_c_is_that_of_a_server(
    server: Server, ray_address: str, config: Path, tmp_path: Path
) -> None:
    """The first run has a Ray of its own, the second one joins that of the server, because it starts sooner.

    The first run has lines that end long after the signal, whenever this process sends it.
    """
    source, out = requests(tmp_path / "requests.jsonl", endless=True), tmp_path / "out.jsonl"
    command = (config, "--input", source, "--output", out, "--concurrency", 4)
    run = run_batch(*command)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not out.exists() or not out.read_bytes().count(b"\n"):
        assert run.process.poll() is None, run.end()
        assert time.monotonic() < deadline, "no line has a result"
        time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    code, _, errors = run.end()
    assert code == 130 and "the same command resumes" in errors, errors
    before = results(out)
    assert 0 < len(before) <= NUM_SHORT
    requests(source, endless=False)
    joined = ("--set", f"cluster.ray_address={ray_address}", "--set", "cluster.ranks=1")
    code, _, errors = run_batch(*command, *joined).end()
    told = f"{NUM_LINES} of {NUM_LINES} lines have a result, 1 with an error"
    assert code == 3 and told in errors, errors
    found = results(out)
    assert before.items() <= found.items()
    assert found.pop("bad")["response"]["status_code"] == 400
    for line in map(json.loads, source.read_text().splitlines()[:-1]):
        body = plain(found.pop(line["custom_id"])["response"]["body"])
        other = plain(server.post(line["url"], json=line["body"]).json())
        if line["body"]["max_tokens"] > SHORT:
            # In LONG sampled tokens the batch may decide between two that are close; the count is that of the request.
            for long in (body, other):
                assert long["choices"][0].pop("text")
        assert body == other, line["custom_id"]
    assert not found
