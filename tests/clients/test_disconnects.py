"""Clients that go away at any byte and at any moment, by closing or by resetting: nothing stays behind."""

import json
import socket
import struct
import time

import pytest

from tests.clients.conftest import HELLO, chat_body, completion_body
from tests.clients.test_openai_structured import CITY
from tests.clients.test_openai_tools import TOOLS

ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
_RESPONSE = {"input": "Hello", "max_output_tokens": 1500}
# So hot that it hardly ever ends by itself.
_MESSAGE = {"messages": HELLO, "max_tokens": 1500, "temperature": 2}
_TOOL = {"name": "look_up", "input_schema": CITY}
BODIES = {
    "stream": ("/v1/completions", completion_body("x", stream=True, **ENDLESS)),
    "whole": ("/v1/completions", completion_body("x", n=4, logprobs=2, **ENDLESS)),
    "long prompt": (
        "/v1/completions",
        completion_body("word " * 1900, **ENDLESS | {"max_tokens": 40}),
    ),
    "form": (
        "/v1/chat/completions",
        chat_body(HELLO, guided_json=CITY | {"title": "new"}, stream=True, n=3, **ENDLESS),
    ),
    "tools": (
        "/v1/chat/completions",
        chat_body(HELLO, tools=TOOLS, tool_choice="required", **ENDLESS),
    ),
    "response": ("/v1/responses", {**_RESPONSE, "ignore_eos": True, "stream": True}),
    "whole response": ("/v1/responses", {**_RESPONSE, "ignore_eos": True}),
    "message": ("/v1/messages", {**_MESSAGE, "stream": True}),
    "whole message": ("/v1/messages", {**_MESSAGE, "tools": [_TOOL]}),
}


def raw(path: str, body: dict, *more: str) -> bytes:
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *more]
    head.append(f"content-length: {len(content)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


def connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def check_free(server) -> None:
    server.wait_free()
    answer = server.post("/v1/completions", json=completion_body("x", max_tokens=1))
    assert answer.status_code == 200


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", BODIES)
def test_leaving_after(server, kind, resets):
    """Between any two bytes of the request, and at many moments after it."""
    request = raw(*BODIES[kind])
    sizes = [1, 20, len(request) // 2, len(request) - 1] + [len(request)] * 6
    delays = [0, 0, 0, 0, 0, 0.001, 0.005, 0.02, 0.08, 0.2]
    for size, delay in zip(sizes, delays, strict=True):
        with connect(server) as connection:
            connection.sendall(request[:size])
            time.sleep(delay)
            if resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    check_free(server)


def test_leaving_all_at_once(server):
    """More than can run: some leave while they wait."""
    connections = [connect(server) for _ in range(40)]
    for i, connection in enumerate(connections):
        connection.sendall(raw(*BODIES[list(BODIES)[i % len(BODIES)]]))
    deadline = time.monotonic() + 60
    while (load := server.get("/load").json()["server_load"]) <= 20:
        assert time.monotonic() < deadline, load
    for connection in connections:
        connection.close()
    check_free(server)


def test_one_connection_many_requests(server):
    """Sent without waiting for answers; each is answered, in order, and the last one may leave."""
    lengths = (3, 1, 5, 2)
    with connect(server) as connection:
        bodies = [completion_body("x", max_tokens=length, ignore_eos=True) for length in lengths]
        connection.sendall(b"".join(raw("/v1/completions", body) for body in bodies))
        received = b""
        while received.count(b'"usage"') < len(lengths):
            part = connection.recv(65536)
            assert part, received
            received += part
        counts = [int(part.split(b",")[0]) for part in received.split(b'"completion_tokens":')[1:]]
        assert tuple(counts) == lengths
        connection.sendall(raw(*BODIES["stream"]))
        time.sleep(0.1)
    check_free(server)


def test_a_body_in_chunks_after_100_continue(server):
    body = json.dumps(completion_body("x", max_tokens=2)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    )
    with connect(server) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        for i in range(0, len(body), 7):
            part = body[i : i + 7]
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
    assert b'"completion_tokens":2' in received
