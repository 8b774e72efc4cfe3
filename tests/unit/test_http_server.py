"""The HTTP server with real sockets: clients that are silent, slow, endless or deaf cost a timer and nothing else."""

import asyncio
import http.client
import json
import socket
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from uvicorn.server import ServerState

from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.serve_section import LimitsConfig, ServeConfig
from cluster.ingress import http_server
from cluster.ingress.http_protocol import limited_protocol
from cluster.ingress.http_server import HttpServer, connections_limit
from tests.unit.api_fakes import Api, FakeBackend, tiny_checkpoint

LIMITS = LimitsConfig(client_timeout_s=0.4, keep_alive_s=0.4)
WAIT_S = 60
SOON_S = 30
"""Far above LIMITS, because the machine may be busy, and far below the limits that are the default."""


def with_server(
    talk, backend: FakeBackend | None = None, limits: LimitsConfig = LIMITS, **serve: str
):
    """Run talk(port) in a thread against a real HTTP server of a fake engine."""

    async def scenario():
        api = Api(backend, client_timeout_s=limits.client_timeout_s)
        with socket.socket() as taken:  # no other process gets the port, and the server shares it
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            server = HttpServer(api.app, ServeConfig(port=port, limits=limits, **serve))
            server.start()
            try:
                return await asyncio.to_thread(talk, port)
            finally:
                await server.stop()

    return asyncio.run(scenario())


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.01)


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
    assert answer in (b"", b"HTTP/1.1 408") and seconds < SOON_S


def test_a_head_that_trickles():
    def talk(port):
        with connect(port) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\n")
            started = time.monotonic()
            connection.settimeout(0.05)
            answer = b""
            while not answer and time.monotonic() - started < SOON_S:
                connection.sendall(b"X-A: b\r\n")
                with suppress(TimeoutError):
                    answer = connection.recv(65536)
            return answer, time.monotonic() - started

    answer, seconds = with_server(talk)
    assert answer.startswith(b"HTTP/1.1 408 ") and seconds > 0.3
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


def test_a_body_before_a_head_is_no_part_of_the_head():
    """One read may hold the end of a body and the beginning of the next request."""

    async def scenario() -> list[bytes]:
        config = uvicorn.Config(Api().app, ws="none", lifespan="off", log_config=None)
        protocol = limited_protocol(WAIT_S, 8)(config, ServerState(), {})
        transport = Mock(is_closing=lambda: False, get_extra_info=lambda *_: None)
        protocol.connection_made(transport)
        for _ in range(2):
            protocol.data_received(b"POST /none HTTP/1.1\r\nContent-Length: 100000\r\n")
            protocol.data_received(b"\r\n" + b"x" * 100_000 + b"GET /live HTTP/1.1\r\n")
            protocol.data_received(b"X-A: " + b"b" * 40_000 + b"\r\n\r\n")
        protocol.data_received(b"GET /live HTTP/1.1\r\nX-A: " + b"b" * 70_000)
        answers = [call.args[0][:12] for call in transport.write.call_args_list]
        protocol.connection_lost(None)
        await asyncio.gather(*protocol.tasks)
        return answers

    assert asyncio.run(scenario()) == [b"HTTP/1.1 431"]


def test_nonsense_gets_the_envelope():
    def talk(port):
        with connect(port) as connection:
            connection.sendall(b"hello, who is there?\r\n\r\n")
            return read_all(connection)

    answer = with_server(talk)
    assert answer.startswith(b"HTTP/1.1 400 ") and body_of(answer)["message"]


def test_an_idle_connection_is_closed_and_a_busy_one_kept():
    def keeps(client: http.client.HTTPConnection) -> bool:
        """Whether the connection outlives `keep_alive_s` in use; repeated where this process was too slow for that."""
        client.connect()
        used = time.monotonic()
        for _ in range(3):
            time.sleep(0.2)
            try:
                client.request("GET", "/live")
                assert client.getresponse().read() == b'{"status":"alive"}'
                assert client.sock is not None, "the server closed a busy connection"
            except (http.client.HTTPException, ConnectionError):
                assert time.monotonic() - used > 0.35, "the server closed a busy connection"
                client.close()
                return False
            used = time.monotonic()
        return True

    def talk(port):
        connect(port).close()
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        while not keeps(client):
            pass
        started = time.monotonic()
        return client.sock.recv(10), time.monotonic() - started

    last, seconds = with_server(talk)
    assert last == b"" and seconds < SOON_S


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
            deadline = time.monotonic() + WAIT_S
            while not backend.aborted and time.monotonic() < deadline:
                time.sleep(0.02)
            return set(backend.open), list(backend.aborted)

    still_open, aborted = with_server(talk, backend)
    assert not still_open and len(aborted) == 1


def test_connections_have_a_limit():
    def talk(port):
        open_ones = [connect(port) for _ in range(2)]
        for each in open_ones:
            each.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert each.recv(65536).startswith(b"HTTP/1.1 200 ")
        with connect(port) as refused:
            answer = read_all(refused)
        open_ones.pop().close()
        deadline = time.monotonic() + WAIT_S
        while True:  # the server learns of the end a moment later
            with connect(port) as again, suppress(OSError):
                again.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
                if again.recv(65536).startswith(b"HTTP/1.1 200 "):
                    open_ones.pop().close()
                    return answer
            assert time.monotonic() < deadline

    answer = with_server(talk, limits=LimitsConfig(max_connections=2))
    assert answer.startswith(b"HTTP/1.1 503 ") and "2 connections" in body_of(answer)["message"]


def test_connections_leave_files_for_the_ranks(monkeypatch, caplog):
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (1000, 1000))
    assert connections_limit(ServeConfig()) == 750
    limits = LimitsConfig(max_connections=900)
    assert connections_limit(ServeConfig(limits=limits)) == 750
    assert "max_connections = 900 is lowered to 750" in caplog.text
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (2**20, 2**20))
    assert connections_limit(ServeConfig()) == 16384


def test_https(certificate):
    cert, key = certificate

    def talk(port):
        connect(port).close()
        trust = ssl.create_default_context(cafile=cert)
        client = http.client.HTTPSConnection("localhost", port, timeout=WAIT_S, context=trust)
        client.request("GET", "/live")
        return client.getresponse().read()

    answer = with_server(talk, limits=LimitsConfig(), tls_cert_file=cert, tls_key_file=key)
    assert answer == b'{"status":"alive"}'


def test_wrong_certificates_are_named(certificate, tmp_path):
    cert, key = certificate
    model = {"path": str(tiny_checkpoint(tmp_path / "tiny"))}
    files = {"tls_cert_file": cert, "tls_key_file": key}
    assert load_config({"model": model, "serve": files}).serve.tls_key_file == key
    for wrong, words in (
        ({"tls_cert_file": cert}, "both serve.tls_cert_file and serve.tls_key_file"),
        ({**files, "tls_cert_file": str(tmp_path / "none")}, "No such file"),
        ({**files, "tls_key_file": cert}, "cannot be used with serve.tls_key_file"),
    ):
        with pytest.raises(ConfigError, match=r"serve\.tls_cert_file") as error:
            load_config({"model": model, "serve": wrong})
        assert words in str(error.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a certificate for localhost that signs itself, and of its key."""
    folder = tmp_path_factory.mktemp("certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(folder / "cert.pem"), str(folder / "key.pem")
