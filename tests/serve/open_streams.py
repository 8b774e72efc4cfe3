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
        deadline = time.monotonic() + 60
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


def check_stop_ends(server: Server, number: signal.Signals, key: str = "unused") -> None:
    """A stop is much shorter than a drain may be, leaves nothing, and ends an open stream with the reason."""
    family = server.descendants()  # the stream may end while they are looked for
    stream = Stream(server, 2000, key)
    seconds, left = server.stop(number, family)
    assert seconds < 25 and not left, (seconds, left)
    assert server.process.returncode == 0, server.log.read_text()
    stream.join(60)
    assert not stream.is_alive(), "the stream hangs"
    assert stream.lines[-1] == "data: [DONE]", stream.lines[-1]
    assert "the server is stopping" in stream.lines[-2], stream.lines[-2]


def check_death_ends(server: Server, stream: Stream) -> None:
    """The death of a rank ends a server without attempts to rebuild; it names the rank, and the stream ends."""
    family = server.descendants()
    server.ranks()[0].kill()
    assert server.process.wait(60) == 1 and not left_running(family, 30)
    stream.join(60)
    assert not stream.is_alive(), "the stream hangs"
    assert stream.broken or '"error"' in stream.lines[-2], stream.lines[-2:]
    told = server.log.read_text().split("ready in")[1]
    assert re.search(r"rank [01]: its process died", told), told
    assert "never retrieved" not in told and "Traceback" not in told


def check_drain(server: Server) -> None:
    """SIGTERM lets two streams finish, lets no other request in, and leaves nothing."""
    family, ranks = server.descendants(), server.ranks()
    streams = [Stream(server, 400) for _ in range(2)]
    for rank in ranks:
        rank.suspend()  # the streams are open for as long as this looks at the drain
    try:
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not _all_refuse(server):
            assert time.monotonic() < deadline, "it is still ready"
        answer = server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert server.get("/live").status_code == 200
        assert all(stream.is_alive() for stream in streams), "too quick to prove anything"
    finally:
        for rank in ranks:
            rank.resume()
    for stream in streams:
        stream.join(90)
        assert stream.lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in stream.lines[-2], stream.lines[-2]
    # The drain waits for the lease of a replica that died less than 10 s ago.
    server.process.wait(90)
    assert not left_running(family, 30) and server.process.returncode == 0, server.log.read_text()
    assert "drained" in server.log.read_text()


def _all_refuse(server: Server) -> bool:
    """Whether all ingresses drain. Each connection leads to one of the two, and one may be later than the other."""
    try:
        return all(server.get("/ready").status_code == 503 for _ in range(12))
    except httpx.TransportError:  # an ingress without requests has closed its port
        return False
