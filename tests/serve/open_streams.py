"""Streams that are open while a server stops."""

import json
import re
import signal
import threading
import time

import httpx

from tests.serve.server import Server, left_running


class Stream(threading.Thread):
    """A client that reads one long stream; `lines` grows as it comes."""

    def __init__(self, server: Server, max_tokens: int, key: str = "unused"):
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.broken: httpx.HTTPError | None = None  # the connection ended
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": "x", "max_tokens": max_tokens, "stream": True} | {
            "seed": 1,
            "ignore_eos": True,
        }
        self._headers = {"authorization": f"Bearer {key}"}
        self.start()
        deadline = time.monotonic() + 20
        while not self.lines:
            assert time.monotonic() < deadline, "the stream does not begin"
            time.sleep(0.005)

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=60
            ) as answer:
                self.lines.extend(line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.broken = error

    def text(self) -> str:
        """The text of the answer."""
        items = [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]
        return "".join(item["choices"][0]["text"] for item in items)


def check_stop_ends(server: Server, stream: Stream, *signals: signal.Signals) -> None:
    """Send the signals; the server stops within ten seconds, leaves nothing, and the stream ends with the reason."""
    for number in signals[:-1]:
        server.process.send_signal(number)
        time.sleep(0.3)
    seconds, left = server.stop(signals[-1])
    assert seconds < 10 and not left, (seconds, left)
    assert server.process.returncode == 0, server.log.read_text()
    stream.join(5)
    assert not stream.is_alive(), "the stream hangs"
    assert stream.lines[-1] == "data: [DONE]", stream.lines[-1]
    assert "the server is stopping" in stream.lines[-2], stream.lines[-2]


def check_death_ends(server: Server, stream: Stream) -> None:
    """The death of a rank ends a server without attempts to rebuild; it names the rank, and the stream ends."""
    family = server.descendants()
    server.ranks()[0].kill()
    assert server.process.wait(60) == 1 and not left_running(family, 10)
    stream.join(5)
    assert stream.broken or '"error"' in stream.lines[-2], stream.lines[-2:]
    told = server.log.read_text().split("ready in")[1]
    assert re.search(r"rank [01]: its process died", told), told
    assert "never retrieved" not in told and "Traceback" not in told


def check_drain(server: Server, streams: list[Stream]) -> None:
    """SIGTERM lets the streams finish, lets no other request in, and leaves nothing."""
    family = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while (status := _status(server, "/ready")) != 503:
        assert time.monotonic() < deadline, f"it is still ready: {status}"
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert _status(server, "/live") == 200
    assert all(stream.is_alive() for stream in streams), "too quick to prove anything"
    for stream in streams:
        stream.join(30)
        assert stream.lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in stream.lines[-2], stream.lines[-2]
    # The drain waits for the lease of a replica that died less than 10 s ago.
    server.process.wait(45)
    assert not left_running(family, 3) and server.process.returncode == 0, server.log.read_text()
    assert "drained" in server.log.read_text()


def _status(server: Server, path: str) -> int:
    return httpx.get(f"{server.url}{path}").status_code
