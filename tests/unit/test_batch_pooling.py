"""`phalanx batch` with a model that answers with vectors or scores: each line has the answer of HTTP."""

from pathlib import Path
from typing import Any

import pytest

from cluster.api.pooling.routes import routes_of
from cluster.api.settings import ApiSettings
from cluster.offline.batch import LocalServer
from cluster.offline.dispatcher import Dispatcher
from tests.unit.api_fakes import MODEL, tiny_tokenizer
from tests.unit.pooling_case import PoolingBackend
from tests.unit.test_api_pooling import CLASSIFY, EMBED, SCORE, TOKENS, api_of
from tests.unit.test_batch import CHAT, USER, request, results, run, write
from workers.specs.pooling import PoolingSpec

QUESTION = {"query": "q", "documents": ["a", {"text": "three"}, "bb"], "top_n": 2}
BODIES: dict[str, list[dict[str, Any]]] = {
    "embeddings": [
        {"input": ["hi", "you"], "model": MODEL},
        {"input": [[1], [2, 3]], "dimensions": 2, "encoding_format": "base64"},
        {"input": "hi", "model": "fr"},
    ],
    "pooling": [{"input": "hi"}],
    "classify": [{"input": "hi"}],
    "score": [{"text_1": "q", "text_2": ["a", "bb"]}],
    "rerank": [QUESTION, QUESTION | {"model": "fr", "return_documents": False}],
}


def server_of(spec: PoolingSpec) -> tuple[LocalServer, PoolingBackend]:
    backend = PoolingBackend()
    backend.adapters = {"fr": "/adapters/fr"}
    settings = ApiSettings(pooling=spec)
    return LocalServer(Dispatcher(backend, tiny_tokenizer(), settings), backend), backend


@pytest.mark.parametrize(
    "spec", [EMBED, CLASSIFY, SCORE, TOKENS], ids=["embed", "class", "score", "tokens"]
)
def test_lines_of_every_route_have_the_answers_of_http(tmp_path: Path, spec: PoolingSpec) -> None:
    bodies = [
        (path, body) for path in routes_of(spec.task) for body in BODIES[path.rsplit("/")[-1]]
    ]
    lines = [request(str(number), path, **body) for number, (path, body) in enumerate(bodies)]
    server, backend = server_of(spec)
    out = tmp_path / "results.jsonl"
    batch = run(write(tmp_path / "requests.jsonl", *lines), out, server)
    assert batch.complete and batch.num_errors == 0
    api = api_of(spec)
    api.backend.adapters = backend.adapters
    found = {item["custom_id"]: item["response"] for item in results(out)}
    differing = {"id": None, "created": None}
    for number, (path, body) in enumerate(bodies):
        expected = api.post(path, body)
        assert expected.status_code == found[str(number)]["status_code"] == 200, expected.text
        assert found[str(number)]["body"] | differing == expected.json() | differing
    adapted = {body.get("model") for _, body in bodies} & {"fr"}
    assert {options.get("adapter") for options in backend.options.values()} - {None} == adapted


def test_wrong_lines_of_vectors_have_the_errors_of_http(tmp_path: Path) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": "hi", "dimensions": 7}),
        ("/v1/embeddings", {"input": "hi", "model": "de"}),
        ("/v1/rerank", QUESTION | {"top_n": "2"}),
        (CHAT, {"messages": USER}),
    ]
    lines = [request(str(number), path, **body) for number, (path, body) in enumerate(bodies)]
    out = tmp_path / "results.jsonl"
    batch = run(write(tmp_path / "requests.jsonl", *lines), out, server_of(EMBED)[0])
    assert batch.complete and batch.num_errors == len(bodies)
    api = api_of(EMBED)
    api.backend.adapters = {"fr": "/adapters/fr"}
    found = {item["custom_id"]: item["response"] for item in results(out)}
    for number, (path, body) in enumerate(bodies):
        expected = api.post(path, body)
        assert found[str(number)]["status_code"] == expected.status_code >= 400
        error, over_http = found[str(number)]["body"]["error"], expected.json()["error"]
        if path == CHAT:  # over HTTP the message ends with the place of all routes
            assert error["code"] == over_http["code"] == "unsupported_route"
        else:
            assert error == over_http
