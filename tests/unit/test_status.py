"""`phalanx status`: the states of a server's groups as a table, as JSON and as an exit code."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands.status import duration
from cluster.supervisor.status import GroupStatus
from tests.unit.test_metrics import rebuilding


class Server(HTTPServer):
    """Answers /ready with `status` and `body`; only the first `answers` times, if that is not None."""

    status, body = 200, b""
    answers: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def says(self, status: int, /, **body: object) -> None:
        self.status, self.body = status, json.dumps(body).encode()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path == "/ready"
        self.send_response(self.server.status)
        self.end_headers()
        left = self.server.answers
        if left is not None:
            self.server.answers = max(0, left - 1)
        self.wfile.write(b"" if left == 0 else self.server.body)

    def log_message(self, *_args) -> None:
        pass


@pytest.fixture
def server():
    subject = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=subject.serve_forever, args=(0.01,))
    thread.start()
    yield subject
    subject.shutdown()
    thread.join()
    subject.server_close()


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "80", "no_proxy": "*"}).invoke(app, ["status", *arguments])


def test_a_group_that_serves(server):
    group = GroupStatus(
        "phalanx-1", "decode", "serving", since=time.time() - 7300, vote_ages=[0.0, 0.25]
    )
    group.slow, group.slowdowns = [1], [0.2, 4.56]
    server.says(200, status="ready", groups=[group.to_json()])
    result = run(server.url)
    assert result.exit_code == 0, result.output
    first, state, *rows = result.stdout.splitlines()
    assert first == f"ready  {server.url}"
    assert state.split()[:4] == ["group", "phalanx-1", "serving", "since"]
    assert state.rstrip().endswith("(2 h)")
    assert [row.rstrip().split(None, 2) for row in rows] == [
        ["role", "decode"],
        ["epoch", "0,", "0 rebuilds"],
        ["vote", "ages", "0.0 s, 0.2 s"],
        ["slow", "rank", "1: 4.6 times as long as the others"],
    ]


def test_a_group_that_rebuilds(server):
    status = rebuilding()
    status.progress = (3, 4)
    error = {"message": "the group is rebuilding"}
    server.says(503, status="not ready", groups=[status.to_json()], error=error)
    result = run(server.url)
    assert result.exit_code == 1 and "not ready" in result.stdout
    for part in (
        "the group is rebuilding",
        "rank 0: its process died",
        "weights, 75%",
        "2, 1 rebuilds",
        "2.5 s: rank 1: its process died (processes 1.5 s, group 0.5 s)",
    ):
        assert part in result.stdout, result.stdout


def test_watch_prints_again_until_the_server_is_gone(server):
    group = GroupStatus(state="serving", since=time.time())
    server.says(200, status="ready", groups=[group.to_json()])
    server.answers = 2
    result = run(server.url, "--watch", "0.1")
    assert result.exit_code == 1 and result.stdout.count("ready  ") == 2, result.output
    assert "is not a Phalanx server" in result.stderr


@pytest.mark.parametrize("code", [200, 503])
def test_json_is_the_body_of_ready(server, code):
    body = {"status": "x", "groups": [rebuilding().to_json()], "error": {"message": "m"}}
    server.says(code, **body)
    result = run(server.url.removeprefix("http://"), "--json")
    assert result.exit_code == (code != 200) and json.loads(result.stdout) == body


def test_no_server_and_other_servers(server):
    server.says(200, status="ready")
    result = run(server.url)
    assert result.exit_code == 1 and "is not a Phalanx server" in result.stderr
    server.body = b"<html>"
    assert "is not a Phalanx server" in run(server.url).stderr
    gone = run("127.0.0.1:1")
    assert gone.exit_code == 1 and "no answer from http://127.0.0.1:1/ready" in gone.stderr
    assert run("ftp://host").exit_code == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (119, "119.0 s"), (120, "2 min"), (200_000, "2 d")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
