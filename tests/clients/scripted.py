"""The whole HTTP API on a real socket over a scripted engine: what a model answers is what the test writes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.serve.server import free_port
from tests.unit.api_fakes import IM_END, Api, FakeBackend, Script

Answer = tuple[str, str]


def replies(*answers: Answer) -> Script:
    """A script that says the text of the last of some (words, text) whose words are in the prompt."""

    def script(prompt: list[int], _params: object) -> list[list[int]]:
        asked = bytes(token for token in prompt if token < 256).decode(errors="replace")
        (*_, text) = (text for words, text in answers if words in asked)
        return [*([byte] for byte in text.encode()), [IM_END]]

    return script


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The URL of a running server. Its model takes prompts of a million bytes."""
    backend = FakeBackend(script, max_model_len=10**6, max_request_tokens=10**6)
    port = free_port()
    config = uvicorn.Config(Api(backend).app, port=port, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
        assert not backend.open
    finally:
        server.should_exit = True
        thread.join(60)
