"""Random bodies: always an answer in time, never a 5xx, and the server lives on."""

import json

from hypothesis import HealthCheck, given, settings
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
# Mostly sensible values, so that many bodies get past the checks and into the engine.
FIELDS = {
    "model": st.one_of(st.just(MODEL), JSON),
    "n": st.one_of(st.integers(1, 3), JSON),
    "max_tokens": st.one_of(st.integers(0, 30), JSON),
    "max_completion_tokens": st.one_of(st.integers(1, 30), JSON),
    "temperature": st.one_of(st.floats(0, 2), JSON),
    "top_p": st.one_of(st.floats(0.1, 1), JSON),
    "top_k": st.one_of(st.integers(-1, 50), JSON),
    "min_p": st.one_of(st.floats(0, 1), JSON),
    "seed": st.one_of(st.integers(-(2**63), 2**63 - 1), JSON),
    "stop": st.one_of(st.text("elo ", min_size=1, max_size=3), st.lists(TEXTS, max_size=3), JSON),
    "stop_token_ids": st.one_of(st.lists(st.integers(0, 299), max_size=3), JSON),
    "ignore_eos": st.one_of(st.booleans(), JSON),
    "add_special_tokens": st.one_of(st.booleans(), JSON),
    "stream": st.one_of(st.booleans(), JSON),
    "stream_options": st.one_of(
        st.fixed_dictionaries(
            {},
            optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()},
        ),
        JSON,
    ),
    "echo": st.one_of(st.booleans(), JSON),
    "user": JSON,
    "logprobs": st.one_of(st.none(), st.booleans(), st.integers(0, 5), JSON),
    "top_logprobs": st.one_of(st.integers(0, 5), JSON),
    "prompt_logprobs": st.one_of(st.none(), st.integers(0, 5), JSON),
    "logit_bias": st.one_of(
        st.dictionaries(st.integers(-1, 310).map(str), st.floats(-100, 100), max_size=3), JSON
    ),
    "presence_penalty": st.one_of(st.floats(-2, 2), JSON),
    "frequency_penalty": st.one_of(st.floats(-2, 2), JSON),
    "repetition_penalty": st.one_of(st.floats(0.01, 3), JSON),
    "min_tokens": st.one_of(st.integers(0, 5), JSON),
    "include_stop_str_in_output": st.one_of(st.booleans(), JSON),
    "skip_special_tokens": st.one_of(st.booleans(), JSON),
    "truncate_prompt_tokens": st.one_of(st.integers(-1, 5), JSON),
    "return_token_ids": st.one_of(st.booleans(), JSON),
    "return_tokens_as_token_ids": st.one_of(st.booleans(), JSON),
    "priority": st.one_of(st.integers(-3, 3), JSON),
    "cache_salt": st.one_of(TEXTS, JSON),
    "request_id": st.one_of(TEXTS, JSON),
    "best_of": st.one_of(st.integers(1, 3), JSON),
    "documents": st.one_of(st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2), JSON),
    "add_generation_prompt": st.one_of(st.booleans(), JSON),
    "continue_final_message": st.one_of(st.booleans(), JSON),
    "response_format": st.one_of(st.just({"type": "text"}), JSON),
    "tools": st.one_of(st.just([]), JSON),
    "chat_template_kwargs": st.one_of(st.just({}), JSON),
    "unknown": JSON,
}
BODIES = st.fixed_dictionaries({"prompt": PROMPTS, "messages": MESSAGES}, optional=FIELDS)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
API = Api(FakeBackend())
SLOW_IS_FINE = [HealthCheck.too_slow]


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


@settings(max_examples=200, deadline=5000, suppress_health_check=SLOW_IS_FINE)
@given(PATHS, BODIES)
def test_random_fields(path, body):
    check(path, json.dumps(body).encode())


@settings(max_examples=100, deadline=5000, suppress_health_check=SLOW_IS_FINE)
@given(PATHS, JSON)
def test_random_json(path, value):
    assert check(path, json.dumps(value).encode()) != 200


@settings(max_examples=100, deadline=5000)
@given(PATHS, st.binary(max_size=60))
def test_random_bytes(path, body):
    assert check(path, body) != 200


@settings(max_examples=100, deadline=5000, suppress_health_check=SLOW_IS_FINE)
@given(PATHS, BODIES, st.data())
def test_damaged_json(path, body, data):
    good = json.dumps(body).encode()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    check(path, good[:start] + data.draw(st.binary(max_size=3)) + good[end:])


def test_the_fuzzed_server_still_answers():
    assert API.complete("hi").status_code == 200
