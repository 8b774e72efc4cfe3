"""Random bodies: always an answer in time, never a 5xx, and the server lives on."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.api_fakes import MODEL, Api, FakeBackend

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([10**30, -(10**400), 2**63, 0.0, 1e308]),
)
# Surrogates included: JSON can carry half a character.
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=12)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
        optional={
            "content": st.one_of(
                TEXTS,
                st.none(),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})),
                JSON,
            ),
            "tool_calls": JSON,
            "name": JSON,
        },
    ),
    max_size=3,
)
PROMPTS = st.one_of(
    TEXTS, st.lists(TEXTS, max_size=3), st.lists(st.integers(-1, 310), max_size=6), JSON
)
# Sensible values, so that many bodies get past the checks and into the engine.
FIELDS = {
    "prompt": st.one_of(
        st.sampled_from(["hi", "hello", ["a", "b"]]),
        st.lists(st.integers(0, 299), min_size=1, max_size=6),
    ),
    "messages": st.sampled_from(
        [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}],
        ]
    ),
    "model": st.just(MODEL),
    "n": st.integers(1, 3),
    "best_of": st.none(),
    "max_tokens": st.integers(6, 30),
    "max_completion_tokens": st.integers(6, 30),
    "min_tokens": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 3),
    "logit_bias": st.dictionaries(st.integers(0, 299).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(
        st.text("elo ", min_size=1, max_size=3),
        st.lists(st.text("elo wrd", min_size=1, max_size=3), max_size=3),
    ),
    "stop_token_ids": st.lists(st.integers(0, 299), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 250), min_size=9, max_size=20, unique=True),
    "bad_words": st.lists(st.text("elo wrd", min_size=1, max_size=3).map("x".__add__), max_size=3),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.one_of(st.just(-1), st.integers(1, 5)),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "echo": st.booleans(),
    "user": JSON,
    "logprobs": st.one_of(st.booleans(), st.integers(0, 5)),
    "top_logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 5),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "priority": st.integers(-3, 3),
    "cache_salt": st.text("ab", min_size=1, max_size=2),
    "request_id": st.text("ab", min_size=1, max_size=2),
    "documents": st.lists(st.dictionaries(st.text("ab"), st.text("ab")), max_size=2),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "response_format": st.just({"type": "text"}),
    "tools": st.just([]),
    "chat_template_kwargs": st.just({}),
    "unknown": JSON,
}


SPOILED = {"prompt": PROMPTS, "messages": MESSAGES}


@st.composite
def bodies(draw):
    """A body of some of the fields, up to two of them spoiled."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=12, unique=True))
    body = {name: draw(FIELDS[name]) for name in ("prompt", "messages", *names)}
    for name in draw(st.one_of(st.just([]), st.lists(st.sampled_from(sorted(FIELDS)), max_size=2))):
        body[name] = draw(SPOILED.get(name, JSON))
    return body


BODIES = bodies()
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
API = Api(FakeBackend())


def check(path: str, body: bytes) -> int:
    API.backend.requests.clear()
    response = API.body(body, path)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 200:
        assert API.backend.requests
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.content.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in response.content
        else:
            usage = response.json()["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    else:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert not API.backend.open
    return response.status_code


@settings(max_examples=200)
@given(PATHS, BODIES)
def test_random_fields(path, body):
    check(path, json.dumps(body).encode())


@settings(max_examples=100)
@given(PATHS, JSON)
def test_random_json(path, value):
    assert check(path, json.dumps(value).encode()) != 200


@settings(max_examples=100)
@given(PATHS, st.binary(max_size=60))
def test_random_bytes(path, body):
    assert check(path, body) != 200


@settings(max_examples=100)
@given(PATHS, BODIES, st.data())
def test_damaged_json(path, body, data):
    good = json.dumps(body).encode()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    check(path, good[:start] + data.draw(st.binary(max_size=3)) + good[end:])


def test_the_fuzzed_server_still_answers():
    assert API.complete("hi").status_code == 200
