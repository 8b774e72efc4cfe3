"""schemathesis over the real server's own /openapi.json: bodies that fit the document, and bodies that do not."""

import collections
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import positive_data_acceptance

# A few of each operation by default, many in the exhaustive run.
EXAMPLES = (10, pytest.param(60, marks=pytest.mark.exhaustive))
# Token ids beyond the vocabulary, conflicts of two fields and the like fit the document and are refused.
NOT_CHECKED = [positive_data_acceptance]
# A body that fits may ask for as many tokens as there is room for.
SHORT = {
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "min_tokens": None,
    "n": 1,
    "prompt_logprobs": 1,
}
POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
)
GETS = (
    *("/v1/models", "/v1/models/{model}", "/live", "/ready", "/health", "/ping"),
    *("/version", "/load", "/metrics", "/ranks", "/experts"),
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
)
OTHERS = ("DELETE /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel")


@pytest.fixture(scope="module")
def operations(server) -> dict[str, APIOperation]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


def send(operation: APIOperation, mode: GenerationMode, examples: int) -> dict[int, int]:
    """Every check of schemathesis on so many requests; how many there were of each status."""
    statuses: collections.Counter[int] = collections.Counter()

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = {**case.body, **_changes(case.body)}
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, excluded_checks=NOT_CHECKED)

    check()
    return statuses


def _changes(body: dict[str, Any]) -> dict[str, Any]:
    """So that most get past the model's name, and none asks for as many tokens as there is room for."""
    changes: dict[str, Any] = {"model": "demo"} if "model" in body else {}
    if "prompt" in body or "messages" in body:
        changes["max_tokens"] = 3
    if "input" in body:
        changes["max_output_tokens"] = 3
    changes |= {name: value for name, value in SHORT.items() if name in body}
    if isinstance(body.get("messages"), list):
        # The schema cannot express that only an assistant's message may lack content.
        changes["messages"] = [
            {**message, "content": "Hi"} if message.get("content") is None else message
            for message in body["messages"]
        ]
    return changes


def test_every_operation_is_tested(operations):
    known = {*(f"POST {path}" for path in POSTS), *(f"GET {path}" for path in GETS), *OTHERS}
    assert set(operations) == known


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", GETS)
def test_get(operations, server, path, examples):
    statuses = send(operations[f"GET {path}"], GenerationMode.POSITIVE, examples)
    assert set(statuses) == ({404} if "{" in path else {200})


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", OTHERS)
def test_no_such_response(operations, name, examples):
    assert set(send(operations[name], GenerationMode.POSITIVE, examples)) == {404}


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", POSTS)
def test_post_what_fits(operations, server, path, examples):
    statuses = send(operations[f"POST {path}"], GenerationMode.POSITIVE, examples)
    assert set(statuses) <= {200, 400, 404} and statuses[200] > 0
    server.wait_free()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", POSTS)
def test_post_what_does_not_fit(operations, server, path, examples):
    statuses = send(operations[f"POST {path}"], GenerationMode.NEGATIVE, examples)
    assert set(statuses) <= {400, 404} and statuses[400] > 0
    server.wait_free()
