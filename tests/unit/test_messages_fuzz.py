"""Random bodies for /v1/messages and /v1/messages/count_tokens: always an answer, never a 5xx."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.api_fakes import MODEL, Api, FakeBackend
from tests.unit.test_api_fuzz import JSON, TEXTS
from tests.unit.test_messages_errors import assert_message_error

BLOCKS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXTS}),
    st.fixed_dictionaries(
        {
            "type": st.just("tool_use"),
            "id": TEXTS,
            "name": TEXTS,
            "input": st.dictionaries(TEXTS, JSON, max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": TEXTS, "content": st.one_of(TEXTS, JSON)},
        optional={"is_error": JSON},
    ),
    JSON,
)
CONTENT = st.one_of(TEXTS, st.lists(BLOCKS, max_size=3))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
# Sensible values, so that many bodies get past the checks and into the engine.
FIELDS = {
    "max_tokens": st.integers(1, 30),
    "messages": st.sampled_from(
        [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}],
        ]
    ),
    "model": st.just(MODEL),
    "system": st.one_of(st.just("s"), st.just([{"type": "text", "text": "s"}])),
    "tools": st.lists(
        st.sampled_from("abc").map(lambda name: {"name": name, "input_schema": SCHEMA}),
        unique_by=str,
        max_size=2,
    ),
    "tool_choice": st.sampled_from([{"type": kind} for kind in ("auto", "any", "none")]),
    "thinking": st.fixed_dictionaries(
        {"type": st.sampled_from(["enabled", "disabled", "adaptive"])},
        optional={"budget_tokens": st.integers(1, 10**6)},
    ),
    "output_config": st.sampled_from([{}, {"effort": "high"}, {"format": FORMAT}]),
    "stop_sequences": st.lists(st.text("elo ", min_size=1, max_size=3), max_size=2),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 5),
    "top_p": st.floats(0.1, 1),
    "metadata": JSON,
}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": CONTENT}
    ),
    max_size=3,
)
SPOILED = {"messages": st.one_of(MESSAGES, JSON), "system": st.one_of(CONTENT, JSON)}
NAMES = (*FIELDS, "output_format", "mcp_servers", "container", "thread")
API = Api(FakeBackend())


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body of some of the fields, up to two of them spoiled."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=9, unique=True))
    body = {name: draw(FIELDS[name]) for name in ("max_tokens", "messages", *names)}
    for name in draw(st.one_of(st.just([]), st.lists(st.sampled_from(NAMES), max_size=2))):
        body[name] = draw(SPOILED.get(name, JSON))
    return body


@settings(max_examples=250)
@given(bodies(), st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]))
def test_random_fields(body: dict[str, Any], path: str):
    API.backend.requests.clear()
    response = API.post(path, body)
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        kind = "not_found_error" if response.status_code == 404 else "invalid_request_error"
        assert_message_error(response, response.status_code, kind)
    elif path.endswith("count_tokens"):
        assert response.json()["input_tokens"] > 0
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.content.endswith(b'data: {"type":"message_stop"}\n\n')
    else:
        assert response.json()["type"] == "message"
    assert not API.backend.open


def test_the_fuzzed_server_still_answers():
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    assert API.post("/v1/messages", body).status_code == 200
