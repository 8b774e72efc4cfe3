"""logprobs, prompt_logprobs and token ids in both APIs' shapes, whole and streamed.

The fake model finds each token t second (-1.0), its neighbour t ^ 1 first (-0.5), and from three
alternatives on the last one impossible (-inf).
"""

import json

import pytest

from cluster.api.answer.detokenizer import DecoderFactory
from cluster.api.answer.logprobs import Shown, TokenReport, escaped, finite
from tests.unit.api_fakes import IM_END, Api, FakeBackend, events, says
from tests.unit.test_detokenizer import FALLBACK, SPACE
from workers.wire.request import RequestOutput, TokenLogprobs

FLOOR = -9999.0


def joined(items):
    """One completions logprobs object of a stream's."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [value for item in items for value in item[key]] for key in keys}


def completion_logprobs(stream, script, **fields):
    response = Api(FakeBackend(script)).complete(stream=stream, **fields)
    if not stream:
        return response.json()["choices"][0]["logprobs"]
    return joined([item["choices"][0]["logprobs"] for item in events(response)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_completions_shape(stream, size):
    script = says("abc", size=size, end=[IM_END])
    assert completion_logprobs(stream, script, logprobs=1) == {
        "tokens": ["a", "b", "c", "<|im_end|>"],
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": [
            {"`": -0.5, "a": -1.0},
            {"c": -0.5, "b": -1.0},
            {"b": -0.5, "c": -1.0},
            {"": -0.5, "<|im_end|>": -1.0},
        ],
        "text_offset": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_no_alternatives(stream):
    assert completion_logprobs(stream, says("ab"), logprobs=0, max_tokens=2) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"a": -1.0}, {"b": -1.0}],
        "text_offset": [0, 1],
    }


def test_impossible_tokens_are_valid_json():
    response = Api(FakeBackend("a")).complete(logprobs=3, max_tokens=1)
    assert b"Infinity" not in response.content
    (top,) = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"`": -0.5, "a": -1.0, "\x07": FLOOR}
    assert [finite(value) for value in (float("-inf"), float("nan"), -1e5, 0.0)] == [
        FLOOR,
        FLOOR,
        FLOOR,
        0.0,
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_half_characters(stream):
    logprobs = completion_logprobs(stream, says("a\u20acb"), logprobs=0, max_tokens=5)
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert escaped(b"a\x00\xff") == "\\x61\\x00\\xff"


def chat_contents(response, stream):
    if not stream:
        return response.json()["choices"][0]["logprobs"]["content"]
    items = [item["choices"][0]["logprobs"] for item in events(response)]
    assert items[0] is None  # the role has no tokens
    return [entry for item in items[1:] for entry in item["content"]]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_shape(stream):
    script = says("a\u20ac", end=[IM_END])
    response = Api(FakeBackend(script)).chat(logprobs=True, top_logprobs=2, stream=stream)
    contents = chat_contents(response, stream)
    assert contents[0] == {
        "token": "a",
        "logprob": -1.0,
        "bytes": [97],
        "top_logprobs": [
            {"token": "`", "logprob": -0.5, "bytes": [96]},
            {"token": "a", "logprob": -1.0, "bytes": [97]},
        ],
    }
    assert [entry["token"] for entry in contents] == ["a", "\\xe2", "\\x82", "\\xac", "<|im_end|>"]
    assert [entry["bytes"] for entry in contents[1:4]] == [[0xE2], [0x82], [0xAC]]
    text = b"".join(bytes(entry["bytes"]) for entry in contents[:-1]).decode()
    assert text == "a\u20ac"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0])
def test_chat_without_alternatives(stream, top):
    response = Api(FakeBackend("ab")).chat(
        logprobs=True, top_logprobs=top, max_tokens=2, stream=stream
    )
    contents = chat_contents(response, stream)
    assert [entry["top_logprobs"] for entry in contents] == [[], []]


def test_each_stream_item_has_the_logprobs_of_its_tokens():
    api = Api(FakeBackend(says("abcdef", size=2)))
    items = events(api.chat(n=2, logprobs=True, max_tokens=6, stream=True))
    for item in items:
        (choice,) = item["choices"]
        if "role" not in choice["delta"]:
            tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert "".join(tokens) == choice["delta"]["content"]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_end_with_the_one_that_completed_the_stop_string(stream, size):
    script = says("one two three four", size=size)
    logprobs = completion_logprobs(stream, script, logprobs=0, stop=" thr", max_tokens=50)
    assert "".join(logprobs["tokens"]) == "one two thr"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(stream):
    fields = {"prompt": "hey", "echo": True, "logprobs": 1, "max_tokens": 2}
    logprobs = completion_logprobs(stream, says("ab"), **fields)
    assert logprobs == {
        "tokens": ["h", "e", "y", "a", "b"],
        "token_logprobs": [None, -1.0, -1.0, -1.0, -1.0],
        "top_logprobs": [
            None,
            {"d": -0.5, "e": -1.0},
            {"x": -0.5, "y": -1.0},
            {"`": -0.5, "a": -1.0},
            {"c": -0.5, "b": -1.0},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_prompts_logprobs(stream):
    fields = {"prompt": ["hey", "you"], "echo": True, "logprobs": 0, "max_tokens": 0}
    api = Api(FakeBackend("x"))
    response = api.complete(stream=stream, **fields)
    items = events(response) if stream else [response.json()]
    choices = sorted(
        (choice for item in items for choice in item["choices"]), key=lambda c: c["index"]
    )
    assert [choice["text"] for choice in choices] == ["hey", "you"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [list("hey"), list("you")]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


def test_echo_offsets_follow_the_text():
    prompt = "a\u20ac<|im_start|>b"
    fields = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
    for given in (prompt, [*"a\u20ac".encode(), 257, ord("b")]):
        logprobs = completion_logprobs(False, says("x"), **fields | {"prompt": given})
        assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 14, 15]


def test_echo_without_logprobs_asks_for_none():
    api = Api()
    api.complete(echo=True)
    ((_, params),) = api.backend.requests.values()
    assert params.prompt_logprobs is None


def test_prompt_logprobs_shape():
    body = Api(FakeBackend("x")).complete("h\u20ac", prompt_logprobs=3, max_tokens=1).json()
    (choice,) = body["choices"]
    first, second, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    assert second == {
        "226": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        "227": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"},
        "7": {"logprob": FLOOR, "rank": 3, "decoded_token": "\x07"},
    }
    assert choice["logprobs"] is None
    body = Api(FakeBackend("x")).complete("he", prompt_logprobs=0, max_tokens=1).json()
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {"101": {"logprob": -1.0, "rank": 2, "decoded_token": "e"}},
    ]


def test_prompt_logprobs_of_a_chat_stand_beside_the_choices():
    api = Api(FakeBackend("x"))
    body = api.chat(prompt_logprobs=1, n=2, max_tokens=1).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in choice for choice in body["choices"])
    assert all(choice["logprobs"] is None for choice in body["choices"])


def test_echo_and_prompt_logprobs_each_have_their_number():
    api = Api(FakeBackend("x"))
    for logprobs, prompt_logprobs in ((2, 1), (1, 2)):
        fields = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "max_tokens": 1}
        (choice,) = api.complete("he", echo=True, **fields).json()["choices"]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 2
        assert len(choice["prompt_logprobs"][1]) == 2
    assert {params.prompt_logprobs for _, params in api.backend.requests.values()} == {2}


@pytest.mark.parametrize("path", [Api.complete, Api.chat])
def test_tokens_as_ids(path):
    text = path(
        Api(FakeBackend("a")),
        logprobs=1 if path is Api.complete else True,
        max_tokens=1,
        return_tokens_as_token_ids=True,
    ).text
    assert '"token_id:97"' in text and '"a"' not in text.partition("logprobs")[2]


def test_token_ids_of_completions():
    api = Api(FakeBackend(says("abc", size=2, end=[IM_END])))
    (choice,) = api.complete("hi", return_token_ids=True).json()["choices"]
    assert choice["prompt_token_ids"] == [104, 105]
    assert choice["token_ids"] == [97, 98, 99, IM_END]
    items = events(api.complete("hi", return_token_ids=True, stream=True))
    choices = [item["choices"][0] for item in items]
    assert [choice["token_ids"] for choice in choices] == [[97, 98], [99, IM_END]]
    assert choices[0]["prompt_token_ids"] == [104, 105]
    assert "prompt_token_ids" not in choices[1]


def test_token_ids_of_chats():
    api = Api(FakeBackend(says("ab", end=[IM_END])))
    body = api.chat("hi", return_token_ids=True).json()
    prompt = next(iter(api.backend.requests.values()))[0]
    assert body["prompt_token_ids"] == prompt
    assert body["choices"][0]["token_ids"] == [97, 98, IM_END]
    role, *items = events(api.chat("hi", return_token_ids=True, stream=True))
    assert role["prompt_token_ids"] == prompt
    assert [item["choices"][0]["token_ids"] for item in items] == [[97], [98], [IM_END]]


def test_token_ids_end_with_the_stop_string():
    api = Api(FakeBackend(says("abcdef", size=6)))
    (choice,) = api.complete(stop="c", return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == [97, 98, 99]


def test_the_engine_is_asked_for_what_is_shown():
    api = Api()
    api.chat(logprobs=True, top_logprobs=5)
    api.complete(logprobs=4)
    api.complete(prompt_logprobs=3)
    api.complete(return_token_ids=True)
    asked = [(p.logprobs, p.prompt_logprobs) for _, p in api.backend.requests.values()]
    assert asked == [(5, None), (4, None), (None, 3), (None, None)]


def test_tokens_of_other_tokenizers_keep_their_space():
    decoders = DecoderFactory(FALLBACK)
    the, cat = (FALLBACK.token_to_id(SPACE + word) for word in ("the", "cat"))
    shown = Shown(
        is_chat=False, logprobs=0, prompt_logprobs=None, token_ids=False, tokens_as_ids=False
    )
    report = TokenReport(shown, decoders, [the], "")
    logprob = TokenLogprobs(-1.0, 1, [], [])
    report.add(RequestOutput("r", [cat, cat, 0xE2 + 1], logprobs=[logprob] * 3), 3)
    logprobs = report.take()["logprobs"]
    assert logprobs["tokens"] == [" cat", " cat", "bytes:\\xe2"]
    assert logprobs["text_offset"] == [0, 4, 8]


def test_bodies_are_ascii():
    response = Api(FakeBackend("\u2028\x85")).complete(logprobs=2, max_tokens=5, stream=True)
    assert response.content.isascii()
    assert json.loads(response.content.split(b"\n\n")[0].removeprefix(b"data: "))
