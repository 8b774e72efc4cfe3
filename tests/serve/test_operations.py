"""`phalanx restart`, `scale`, `drain` under open streams; between them a supervisor dies and a disk is gone."""

import re
import shutil
import threading
import time
from pathlib import Path
from typing import Self

import pytest

from cluster.commands.operate import post
from cluster.config.api_keys import OPERATOR_VARIABLE
from tests.serve.conftest import BLOCKS
from tests.serve.open_streams import Stream
from tests.serve.server import OPERATOR_KEY, Server, left_running, running

NUM_TOKENS = 490


class Repeater(threading.Thread):
    """A client with one stream open at any time; `texts` has those that ended."""

    def __init__(self, server: Server):
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.error = ""
        self._server, self._ended = server, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            stream = Stream(self._server, NUM_TOKENS)
            stream.join(120)
            if stream.is_alive() or stream.broken or '"length"' not in stream.lines[-2]:
                self.error = f"{stream.broken}: {stream.lines[-2:]}"
                return
            self.texts.append(stream.text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also after a failure, because other tests share the server."""
        self._ended.set()
        self.join(120)


def operate(server: Server, operation: str, **body: object) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(OPERATOR_VARIABLE, OPERATOR_KEY)
        post(server.url, operation, body, OPERATOR_VARIABLE)


def blocks(server: Server) -> list[int]:
    """The KV blocks of each rank that the HTTP process can reach."""
    found = re.findall(r'cache_config_info{.*num_blocks="(\d+)"', server.get("/metrics").text)
    return [int(number) for number in found]


def wait_blocks(server: Server, *expected: int) -> None:
    """Until the HTTP processes have the figures of the new epoch; the one that made the change has them first."""
    deadline = time.monotonic() + 60
    while (found := blocks(server)) != [*expected]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def rebuild_without_the_disk(server: Server, disk: Path) -> None:
    """A new rank cannot read the checkpoint; the group names it, and serves when it is back."""
    gone = disk.rename(disk.with_name("gone"))
    server.ranks()[0].kill()
    server.wait_line(
        f"its process died; rebuild failed at stage 'group': model path '{disk}' is not a folder"
    )
    gone.rename(disk)
    deadline = time.monotonic() + 120
    while server.get("/ready").json()["groups"][0]["state"] != "serving":
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)


def test_streams_outlive_a_restart_and_another_number_of_ranks(server):
    first = server.ranks()
    with Repeater(server) as client:
        operate(server, "scale", ranks=1)
        wait_blocks(server, BLOCKS)
        operate(server, "restart", set=[f"cache.num_blocks={BLOCKS - 1}"])
        wait_blocks(server, BLOCKS - 1)
        assert not left_running(first, 60)
        operate(server, "scale", ranks=2)
        wait_blocks(server, BLOCKS - 1, BLOCKS - 1)
    assert not client.error and len(set(client.texts)) == 1, client.error or client.texts


@pytest.mark.exhaustive
def test_streams_outlive_all_changes_of_operators(tmp_path, checkpoint):
    disk = Path(shutil.copytree(checkpoint, tmp_path / "disk"))
    with running(tmp_path, disk) as server:
        first = server.ranks()
        with Repeater(server) as client:
            operate(server, "restart", set=["cache.num_blocks=200"])
            wait_blocks(server, 200, 200)
            assert not left_running(first, 60)
            server.wait_successor(server.kill_supervisor())
            rebuild_without_the_disk(server, disk)
            operate(server, "scale", ranks=1)
            wait_blocks(server, 200)
            operate(server, "restart")  # also with the settings of before the supervisor's end
            wait_blocks(server, 200)
            operate(server, "scale", ranks=2)
            wait_blocks(server, 200, 200)
        assert not client.error and len(set(client.texts)) == 1, client.error or client.texts
        family, stream = server.descendants(), Stream(server, NUM_TOKENS)
        operate(server, "drain", timeout_s=60)
        stream.join(60)
        assert stream.lines[-1] == "data: [DONE]" and stream.text() == client.texts[0]
        assert server.process.wait(60) == 0 and not left_running(family, 60)
        printed = server.log.read_text().split("ready in")[1]
        assert "Traceback" not in printed, printed
