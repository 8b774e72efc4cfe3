"""The demo model on two real servers of two ranks, for all clients; each test leaves them with nothing to do."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from scripts.byte_tokenizer import CHAT_TEMPLATE
from tests.serve.open_streams import check_stop_ends
from tests.serve.server import ROOT, Server, running

DEMO = ROOT / "configs" / "models" / "demo"
MODEL = "demo"
HELLO = [{"role": "user", "content": "Hello"}]
HELLO_ANSWER = "Hello! I am a small demo model served by Phalanx."
# Of the guarded server, which runs MAX_RUNNING choices at once and lets MAX_WAITING wait.
KEY = "a-key-of-the-guarded-server"
TIMEOUT_S = 20.0  # of a request: longer than any but those that wait for suspended ranks
MAX_RUNNING, MAX_WAITING = 4, 2
# As Qwen's templates do it: the prompt opens a thought or closes it, or leaves that to the model.
THINKING = (
    "{%- if add_generation_prompt and enable_thinking is defined %}"
    "{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


@pytest.fixture(scope="package")
def server(tmp_path_factory) -> Iterator[Server]:
    """It also stops at SIGTERM with a stream that does not finish in time."""
    with running(
        tmp_path_factory.mktemp("clients"),
        DEMO,
        model={"max_model_len": 2048, "dtype": "float32"},
        cache={"num_blocks": 1024},
        serve={"model_name": MODEL, "drain_timeout_s": 0.5},
    ) as server:
        yield server
        check_stop_ends(server, signal.SIGTERM)


@pytest.fixture(scope="package")
def guarded(tmp_path_factory, server) -> Iterator[Server]:
    """A server with a key, a short queue, a time limit, and a model that thinks, in the Ray of the other server.

    Its ranks may be suspended for longer than the time limit. It also stops at SIGINT at once, and an open stream gets
    the reason.
    """
    folder = tmp_path_factory.mktemp("guarded")
    template = CHAT_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "") + THINKING
    (folder / "template.jinja").write_text(template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_API_KEY", KEY)
        with running(
            folder,
            DEMO,
            joins=server,
            model={"max_model_len": 2048, "dtype": "float32"},
            cache={"num_blocks": 1024},
            cluster={"hang_timeout_s": 10 * TIMEOUT_S},
            scheduler={"max_num_seqs": MAX_RUNNING // 2},
            serve={
                "model_name": MODEL,
                "chat_template": "template.jinja",
                "max_queued_requests": MAX_WAITING,
                "limits": {"request_timeout_s": TIMEOUT_S},
            },
        ) as guarded:
            yield guarded
            check_stop_ends(guarded, signal.SIGINT, KEY)


@pytest.fixture(scope="package")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def complete(client) -> Callable[..., Completion]:
    """complete(prompt, **fields): greedy and 8 tokens long unless the fields say otherwise."""

    def call(prompt: Any, **fields: Any) -> Completion:
        return client.completions.create(**completion_body(prompt, **fields))

    return call


@pytest.fixture
def chat(client) -> Callable[..., ChatCompletion]:
    """chat(messages, **fields), greedy unless the fields say otherwise."""

    def call(messages: Any = HELLO, **fields: Any) -> ChatCompletion:
        return client.chat.completions.create(**chat_body(messages, **fields))

    return call


def completion_body(prompt: Any, **fields: Any) -> dict[str, Any]:
    """Arguments of a completion."""
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}


def chat_body(messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    """Arguments of a chat completion."""
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


@pytest.fixture(scope="package")
def ids(server) -> Callable[[str], list[int]]:
    """ids(text): the demo model's tokens of a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
