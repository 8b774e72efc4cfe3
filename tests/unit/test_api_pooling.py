"""Vectors, classes and scores over HTTP: shapes of answers, checks of requests, and the official client."""

import asyncio
import base64
import math
from typing import Any

import numpy as np
import openai
import pytest

from tests.unit.api_fakes import MODEL, Api, assert_error
from tests.unit.pooling_case import PoolingBackend
from workers.specs.pooling import PoolingSpec

EMBED = PoolingSpec(task="embed", size=4, dimensions=(2, 3))
CLASSIFY = PoolingSpec(task="classify", size=4, labels=("bad", "good", "odd"), activation="softmax")
SCORE = PoolingSpec(task="score", size=4, labels=("relevant",), activation="sigmoid")
TOKENS = PoolingSpec(task="score", size=4, score_tokens=("n", "y"), activation="sigmoid")


def api_of(spec: PoolingSpec, **settings: Any) -> Api:
    return Api(PoolingBackend(), pooling=spec, **settings)


def embedding(ids: list[int], size: int = 4) -> list[float]:
    vector = np.array([len(ids), ids[0], ids[-1], 1], dtype=np.float32)[:size]
    return (vector / np.linalg.norm(vector)).tolist()


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_embeddings_of_texts_and_token_ids():
    api = api_of(EMBED)
    answer = api.post("/v1/embeddings", {"model": MODEL, "input": ["hi", "you"]}).json()
    assert answer["id"].startswith("embd-") and answer["object"] == "list"
    assert answer["model"] == MODEL
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert [item["object"] for item in answer["data"]] == ["embedding"] * 2
    assert answer["data"][1]["embedding"] == embedding(list(b"you"))
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 5,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    for value, ids in ((list(b"abc"), [list(b"abc")]), ([[1], [2, 3]], [[1], [2, 3]])):
        data = api.post("/v1/embeddings", {"input": value}).json()["data"]
        assert [item["embedding"] for item in data] == [embedding(it) for it in ids]


def test_embeddings_in_base64_cut_and_raw():
    api = api_of(EMBED)
    body = {"input": "hello", "encoding_format": "base64", "dimensions": 2}
    found = api.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(found), dtype="<f4")
    assert vector.tolist() == embedding(list(b"hello"), 2)
    for field in ("normalize", "use_activation"):
        raw = api.post("/v1/embeddings", {"input": "hello", field: False}).json()
        assert raw["data"][0]["embedding"] == [5, ord("h"), ord("o"), 1]


def test_the_official_client_reads_embeddings():
    async def run() -> Any:
        http = api_of(EMBED).client()
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http
        ) as client:
            return await client.embeddings.create(model=MODEL, input=["hello", "you"])

    found = asyncio.run(run())  # it asks for base64 by itself
    assert [len(item.embedding) for item in found.data] == [4, 4]
    assert found.data[1].embedding == pytest.approx(embedding(list(b"you")))
    assert found.usage.prompt_tokens == 8


def test_messages_are_one_prompt_by_the_chat_template():
    api = api_of(EMBED)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert len(api.post("/v1/embeddings", body).json()["data"]) == 1
    (ids, _), *_ = api.backend.requests.values()
    assert bytes(it for it in ids if it < 256).decode().count("hi") == 1
    error = assert_error(api.post("/v1/embeddings", {**body, "input": "a"}), 400)
    assert error["param"] == "input"


def test_truncation_keeps_the_beginning():
    api = api_of(EMBED)
    body = {"input": ["hello", "you"], "truncate_prompt_tokens": 4}
    data = api.post("/v1/embeddings", body).json()["data"]
    assert [it["embedding"] for it in data] == [embedding(list(b"hell")), embedding(list(b"you"))]
    api = Api(PoolingBackend(max_model_len=3), pooling=EMBED)
    data = api.post("/v1/embeddings", {"input": "hello", "truncate_prompt_tokens": -1}).json()
    assert data["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "not an empty list"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [1, 300]}, "input", "not in the vocabulary of 300"),
        ({"input": "x" * 11}, "input", "11 tokens, this server takes at most 10"),
        ({"input": ["a"] * 4}, "input", "4 texts are more than 3"),
        ({"input": "a", "dimensions": 1}, "dimensions", "2, 3, 4 (model.pooling.dimensions)"),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions is 5"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "\ud800"}, "input", "surrogate"),
    ],
)
def test_bad_requests_name_the_field(fields: dict[str, Any], param: str, words: str):
    api = Api(PoolingBackend(max_model_len=10), pooling=EMBED, max_choices=3)
    error = assert_error(api.post("/v1/embeddings", fields), 400)
    assert error["param"] == param and words in error["message"], error
    assert not api.backend.requests


def test_an_unknown_model_and_an_error_of_the_rank():
    api = api_of(EMBED)
    assert_error(
        api.post("/v1/embeddings", {"model": "other", "input": "a"}), 404, "model_not_found"
    )
    api.backend.error = "the logits are invalid: hidden states are NaN or infinite"
    assert_error(api.post("/v1/embeddings", {"input": "a"}), 500, "invalid_logits")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents")])
def test_scores_of_embeddings_are_their_cosines(path: str, first: str, second: str):
    api = api_of(EMBED)
    answer = api.post(path, {first: "ab", second: ["ab", "xyz"]}).json()
    assert answer["id"].startswith("score-") and answer["data"][0]["object"] == "score"
    expected = float(np.dot(embedding(list(b"ab")), embedding(list(b"xyz"))))
    assert [it["score"] for it in answer["data"]] == pytest.approx([1.0, expected])
    pairs = api.post(path, {first: ["ab", "xyz"], second: ["xyz", "xyz"]}).json()
    assert [it["score"] for it in pairs["data"]] == pytest.approx([expected, 1.0])


def test_scores_of_a_head_take_the_tokenizers_pair():
    api = api_of(SCORE)
    answer = api.post("/score", {"text_1": "ab", "text_2": ["cde", "f"]}).json()
    assert [it["score"] for it in answer["data"]] == pytest.approx([sigmoid(0.05), sigmoid(0.03)])
    assert [bytes(ids) for ids, _ in api.backend.requests.values()] == [b"abcde", b"abf"]
    raw = api.post("/score", {"text_1": "ab", "text_2": "f", "use_activation": False}).json()
    assert raw["data"][0]["score"] == pytest.approx(0.03)
    cut = {"text_1": "ab", "text_2": "cdefgh", "truncate_prompt_tokens": 4}
    assert api.post("/score", cut).json()["usage"]["prompt_tokens"] == 4
    assert_error(api.post("/score", {**cut, "truncate_prompt_tokens": 1}), 400)


def test_scores_of_two_tokens_take_a_template():
    api = api_of(TOKENS)
    fields = {"query": "sky", "documents": ["blue", "a green door"], "instruction": "Find it"}
    answer = api.post("/rerank", fields).json()
    prompts = [bytes(i for i in ids if i < 256) for ids, _ in api.backend.requests.values()]
    assert all(b"<Instruct>: Find it\n<Query>: sky\n<Document>: " in it for it in prompts)
    assert [it["index"] for it in answer["results"]] == [1, 0]  # the longer prompt
    (option, *_) = api.backend.options.values()
    assert option["pooling"].token_ids == (ord("n"), ord("y"))
    whole = answer["usage"]["prompt_tokens"] // 2
    api = api_of(TOKENS)
    api.post("/rerank", {**fields, "truncate_prompt_tokens": whole})
    assert [len(ids) for ids, _ in api.backend.requests.values()] == [whole - 4, whole]


def test_a_document_is_cut_in_front_of_a_character_of_several_tokens():
    """Its first token alone is a replacement character, which has more tokens than may stay."""
    api = api_of(TOKENS)
    body = {"text_1": "sky", "text_2": "ab"}
    whole = api.post("/score", body).json()["usage"]["prompt_tokens"]
    cut = {**body, "text_2": "a\u20ac", "truncate_prompt_tokens": whole}
    assert api.post("/score", cut).json()["usage"]["prompt_tokens"] == whole - 1
    assert_error(api.post("/score", {**cut, "truncate_prompt_tokens": whole - 3}), 400)


def test_a_chat_template_with_the_roles_of_pairs_makes_the_prompts():
    from cluster.api.tokenizer import load_tokenizer
    from tests.unit.api_fakes import tiny_tokenizer

    folder, _ = tiny_tokenizer().source
    template = "{% for m in messages %}{{ {'query': 'Q', 'document': 'D'}[m.role] ~ m.content }}{% endfor %}"
    api = Api(PoolingBackend(), load_tokenizer(folder, template), pooling=TOKENS)
    api.post("/score", {"text_1": "a", "text_2": "b"})
    assert [bytes(ids) for ids, _ in api.backend.requests.values()] == [b"QaDb"]


def test_score_tokens_of_several_tokens_are_refused_at_the_start():
    spec = PoolingSpec(task="score", size=4, score_tokens=("no", "yes"))
    with pytest.raises(ValueError, match="score_tokens: 'no' is 2 tokens"):
        api_of(spec)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking_in_the_shapes_of_jina_and_cohere(path: str):
    api = api_of(SCORE)
    documents = ["a", {"text": "three"}, "bb"]
    answer = api.post(path, {"query": "q", "documents": documents, "top_n": 2}).json()
    assert answer["id"].startswith("rerank-") and answer["model"] == MODEL
    assert answer["results"] == [
        {
            "index": 1,
            "relevance_score": pytest.approx(sigmoid(0.06)),
            "document": {"text": "three"},
        },
        {"index": 2, "relevance_score": pytest.approx(sigmoid(0.03)), "document": {"text": "bb"}},
    ]
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] == 11
    body = {"query": "q", "documents": documents, "return_documents": False}
    results = api.post(path, {**body, "max_tokens_per_doc": 2}).json()["results"]
    assert len(results) == 3 and "document" not in results[0]
    assert [it["index"] for it in results] == [1, 2, 0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_2": "b"}, "text_1"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/pooling", {"input": "a", "task": "embed"}, "task"),
    ],
)
def test_bad_pairs_name_the_field(path: str, fields: dict[str, Any], param: str):
    assert assert_error(api_of(SCORE).post(path, fields), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query", "query is empty"),
        ("/rerank", {"query": "a", "documents": ["x" * 11]}, "documents", "documents has 11"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents", "documents[1] is empty"),
        ("/score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1", "text_1[1] is empty"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2", "text_2[1] is empty"),
    ],
)
def test_texts_that_are_embedded_for_a_pair_are_named_by_their_place(
    path: str, fields: dict[str, Any], param: str, words: str
):
    api = Api(PoolingBackend(max_model_len=10), pooling=EMBED)
    error = assert_error(api.post(path, fields), 400)
    assert error["param"] == param and words in error["message"], error


def test_classes_are_probabilities_with_names():
    api = api_of(CLASSIFY)
    (found,) = api.post("/classify", {"input": "ab"}).json()["data"]
    logits = np.array([2, ord("a"), ord("b")]) / 100
    probs = np.exp(logits) / np.exp(logits).sum()
    assert found == {
        "index": 0,
        "label": "odd",
        "probs": pytest.approx(probs.tolist()),
        "num_classes": 3,
    }
    (raw,) = api.post("/classify", {"input": "ab", "activation": False}).json()["data"]
    assert raw["probs"] == pytest.approx(logits.tolist())


def test_pooling_answers_with_what_the_model_makes():
    answer = api_of(EMBED).post("/pooling", {"input": "ab"}).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": embedding(list(b"ab"))}]
    answer = api_of(TOKENS).post("/pooling", {"input": "ab", "task": "score"}).json()
    assert answer["data"][0]["data"] == pytest.approx([sigmoid(0.02)])


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        (None, "/v1/embeddings", "generates text, the server has no embeddings"),
        (EMBED, "/v1/chat/completions", "makes embeddings (model.task = embed)"),
        (EMBED, "/classify", "the server has no classes"),
        (SCORE, "/v1/embeddings", "scores texts (model.task = score)"),
        (CLASSIFY, "/rerank", "it answers POST /pooling, /classify"),
    ],
)
def test_a_request_of_another_kind_gets_the_reason(spec: PoolingSpec | None, path: str, words: str):
    error = assert_error(Api(pooling=spec).post(path, {}), 400, "unsupported_route")
    assert words in error["message"]


def test_a_probe_of_readiness_asks_for_a_vector():
    api = api_of(TOKENS)
    assert api.get("/ready").status_code == 200
    (name,) = api.backend.options
    assert name.startswith("probe-") and api.backend.options[name]["pooling"].token_ids == (0, 0)
