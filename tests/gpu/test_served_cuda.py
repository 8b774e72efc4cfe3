"""The served endpoint on GPUs, as a client sees it over HTTP: float32 tokens equal transformers' on a CPU."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.engine_harness import RankResult
from tests.distributed.reference import (
    NEW_TOKENS,
    Reference,
    check,
    generate_references,
    write_checkpoint,
)

pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")

START_TIMEOUT_S = 400  # the first start on a machine compiles
AT_ONCE = 32
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    return generate_references(checkpoint, "cpu")[:AT_ONCE]


@pytest.fixture(scope="module", params=[1, 4], ids=lambda ranks: f"{ranks}-ranks")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Any]:
    """Of as many ranks. Ray gives each of them a GPU of its own, so none are shared here."""
    from tests.serve.server import running

    found = torch.cuda.device_count()
    if found < request.param:
        pytest.skip(f"needs {request.param} GPUs, found {found}")
    with running(
        tmp_path_factory.mktemp("server"),
        checkpoint,
        start_timeout_s=START_TIMEOUT_S,
        model={"max_model_len": 1024, "dtype": "float32"},
        cluster={"ranks": request.param, "device": "cuda"},
    ) as server:
        yield server


def complete(server: Any, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def check_tokens(references: list[Reference], answers: list[httpx.Response]) -> None:
    """All of transformers' tokens, as far as they are no matter of rounding."""
    result = RankResult()
    for index, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        result.tokens[str(index)] = choice["token_ids"]
        result.reasons[str(index)] = choice["finish_reason"]
    check(references, [result], len(answers))
    lengths = {len(tokens) for tokens in result.tokens.values()}
    assert lengths == {NEW_TOKENS}


def test_health_and_models(server: Any) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    models = httpx.get(f"{server.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]


def test_greedy_tokens_equal_transformers(server: Any, references: list[Reference]) -> None:
    """One after the other, so that each runs alone."""
    answers = [
        complete(server, ref.prompt, max_tokens=NEW_TOKENS, return_token_ids=True)
        for ref in references[:8]
    ]
    check_tokens(references, answers)
    usage = answers[5].json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (600, NEW_TOKENS)


def test_many_at_once_get_the_same_from_all_ranks(server: Any, references: list[Reference]) -> None:
    def ask(reference: Reference) -> httpx.Response:
        return complete(server, reference.prompt, max_tokens=NEW_TOKENS, return_token_ids=True)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(ask, references))
    assert len(answers) == AT_ONCE
    check_tokens(references, answers)
    ranks = httpx.get(f"{server.url}/ranks").json()["ranks"]
    assert len(ranks) == len(server.ranks())
    assert all(rank["generation_tokens"] > 0 for rank in ranks), ranks


def test_a_chat_streams_what_it_answers_whole(server: Any) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{server.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", url, json=asked, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) > 2, "it came in one piece"
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == whole["choices"][0]["message"]["content"] != ""
    assert choices[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([7] * 2000, {}, "maximum context length is 1024 tokens"),
        ([7] * 1000, {"max_tokens": 100}, "lower max_tokens"),
        ([10**6], {}, "1000000"),
        ("x", {"temperature": -1}, "temperature"),
    ],
)
def test_a_bad_request_is_told_why_and_the_next_is_answered(
    server: Any, prompt: Any, fields: dict[str, Any], words: str
) -> None:
    answer = complete(server, prompt, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and words in error["message"]
    assert complete(server, "x", max_tokens=1).status_code == 200


def test_sigint_ends_it_and_leaves_nothing(server: Any) -> None:
    """The last test of a server, since nobody answers afterwards."""
    assert server.process.poll() is None, server.log.read_text()
    ranks = server.ranks()
    seconds, left = server.stop()
    assert ranks and not left, (seconds, left)
    assert server.process.returncode == 0, server.log.read_text()
    assert not any(rank.is_running() for rank in ranks)
