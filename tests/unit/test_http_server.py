"""The HTTP server with real sockets: clients that are silent, slow, endless or deaf cost a timer and nothing else."""

import asyncio
import http.client
import json
import socket
import time
from contextlib import suppress

import pytest

from cluster.config.serve_section import LimitsConfig, ServeConfig
from cluster.ingress.http_server import HttpServer
from tests.unit.api_fakes import Api, FakeBackend

LIMITS = LimitsConfig(client_timeout_s=0.4, keep_alive_s=0.4)


def with_server(talk, backend: FakeBackend | None = None, limits: LimitsConfig = LIMITS):
    """Run talk(port) in a thread against a real HTTP server of a fake engine."""

    async def scenario():
        api = Api(backend, client_timeout_s=limits.client_timeout_s)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = HttpServer(api.app, ServeConfig(port=port, limits=limits))
        server.start()
        try:
            return await asyncio.to_thread(talk, port)
        finally:
            await server.stop()

    return asyncio.run(scenario())


def connect(port: int) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError("the server does not listen")


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def body_of(response: bytes) -> dict:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head
    return json.loads(body)["error"]


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_silence_is_hung_up_on(sent):
    def talk(port):
        with connect(port) as connection:
            connection.sendall(sent)
            started = time.monotonic()
            return read_all(connection)[:12], time.monotonic() - started

    answer, seconds = with_server(talk)
    assert answer in (b"", b"HTTP/1.1 408") and seconds < 3


def test_a_head_that_trickles():
    def talk(port):
        with connect(port) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\n")
            started = time.monotonic()
            connection.settimeout(0.05)
            answer = b""
            while not answer and time.monotonic() - started < 5:
                connection.sendall(b"X-A: b\r\n")
                with suppress(TimeoutError):
                    answer = connection.recv(65536)
            return answer, time.monotonic() - started

    answer, seconds = with_server(talk)
    assert answer.startswith(b"HTTP/1.1 408 ") and 0.3 < seconds < 3
    assert body_of(answer)["code"] == "invalid_http"


@pytest.mark.parametrize(
    "part", [b"X-A: " + b"b" * 1000 + b"\r\n", b"b" * 1000], ids=["many", "long"]
)
def test_a_head_without_end(part):
    def talk(port):
        with connect(port) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nX-B: ")
            with suppress(OSError):
                for _ in range(1000):
                    connection.sendall(part)
            try:
                return read_all(connection)
            except ConnectionResetError:
                return b"reset"

    answer = with_server(talk, limits=LimitsConfig())
    assert answer == b"reset" or answer.startswith(b"HTTP/1.1 431 "), answer[:200]


def test_nonsense_gets_the_envelope():
    def talk(port):
        with connect(port) as connection:
            connection.sendall(b"hello, who is there?\r\n\r\n")
            return read_all(connection)

    answer = with_server(talk)
    assert answer.startswith(b"HTTP/1.1 400 ") and body_of(answer)["message"]


def test_an_idle_connection_is_closed_and_a_busy_one_kept():
    def talk(port):
        connect(port).close()
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        for _ in range(3):
            client.request("GET", "/live")
            assert client.getresponse().read() == b'{"status":"alive"}'
            assert client.sock is not None, "the server closed a busy connection"
            time.sleep(0.2)
        started = time.monotonic()
        return client.sock.recv(10), time.monotonic() - started

    last, seconds = with_server(talk)
    assert last == b"" and seconds < 2


def test_a_refused_body_is_read_so_that_its_sender_learns_why():
    def talk(port):
        with connect(port) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
            connection.sendall(head + b"content-length: 20000000\r\n\r\n")
            for _ in range(200):
                connection.sendall(b"x" * 100_000)
                time.sleep(0.001)
            answer = connection.recv(65536)
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            return answer, connection.recv(65536)

    refused, good = with_server(talk, limits=LimitsConfig())
    assert refused.startswith(b"HTTP/1.1 413 "), refused
    assert good.startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_dropped():
    backend = FakeBackend(max_model_len=10**7, max_request_tokens=10**7)

    def talk(port):
        body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": True}).encode()
        with connect(port) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            deadline = time.monotonic() + 20
            while not backend.aborted and time.monotonic() < deadline:
                time.sleep(0.02)
            return set(backend.open), list(backend.aborted)

    still_open, aborted = with_server(talk, backend)
    assert not still_open and len(aborted) == 1
