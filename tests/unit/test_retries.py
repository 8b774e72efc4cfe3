"""Errors that clients must not answer with the same request."""

import pytest

from cluster.errors import ServingError
from tests.unit.api_fakes import Api


class PoisonError(ServingError):
    """The error of a request that must not be sent again."""

    should_retry = False


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("failure", "header"), [(PoisonError("it ended ranks"), "false"), (ServingError("once"), None)]
)
def test_an_error_may_forbid_retries(path, failure, header):
    api = Api()
    api.backend.fail_before = failure
    body = {"max_tokens": 1, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    del body["messages" if path == "/v1/completions" else "prompt"]
    response = api.post(path, body)
    assert response.status_code == 500
    assert response.headers.get("x-should-retry") == header
