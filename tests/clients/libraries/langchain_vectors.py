"""langchain-openai's embeddings of texts: token ids of OpenAI's models mean nothing to servers of other models."""

import asyncio
import math

import openai
from demo import HELLO, KEY, MODEL, QUESTION
from langchain_openai import OpenAIEmbeddings

APIS = ("embeddings",)
TEXTS = [HELLO, QUESTION, "Rome", HELLO, "\u00e4" * 50]


def embeddings(url: str, **fields) -> OpenAIEmbeddings:
    fields = {"model": MODEL, "max_retries": 0} | fields
    return OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key=KEY, check_embedding_ctx_length=False, **fields
    )


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert all(math.isclose(*pair, abs_tol=1e-4) for pair in zip(found, expected, strict=True))


def check_documents_and_query(url, api):
    found = embeddings(url).embed_documents(TEXTS)
    assert len(found) == len(TEXTS)
    for vector in found:
        assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-4), vector
    assert_same(found[0], found[3])
    assert_same(found[1], embeddings(url).embed_query(QUESTION))
    assert math.dist(found[0], found[1]) > 0.01


def check_chunks_of_documents(url, api):
    whole, cut = (embeddings(url, chunk_size=size).embed_documents(TEXTS) for size in (99, 2))
    for vector, expected in zip(cut, whole, strict=True):
        assert_same(vector, expected)


def check_async(url, api):
    async def ask() -> list[list[float]]:
        model = embeddings(url)
        return await asyncio.gather(*(model.aembed_query(text) for text in TEXTS))

    expected = embeddings(url).embed_documents(TEXTS)
    for vector, other in zip(asyncio.run(ask()), expected, strict=True):
        assert_same(vector, other)


def check_dimensions(url, api):
    whole = embeddings(url).embed_query(HELLO)
    cut = embeddings(url, dimensions=16).embed_query(HELLO)
    size = math.hypot(*whole[:16])
    assert_same(cut, [value / size for value in whole[:16]])


def check_bad_model(url, api):
    try:
        embeddings(url, model="other").embed_query(HELLO)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("no error")
