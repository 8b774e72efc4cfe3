"""Makes the answer of an error, in the envelope of its route: OpenAI's, and Anthropic's below /v1/messages."""

from starlette.responses import Response
from starlette.types import Scope

from cluster.api.answer.events import error_body, to_json
from cluster.api.messages.envelope import error_object
from cluster.api.record import REQUEST_ID
from cluster.errors import AuthenticationError, ClientTimeoutError, ServingError

_MESSAGES = "/v1/messages"


def is_messages_route(scope: Scope) -> bool:
    """Whether the path belongs to Anthropic's API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.startswith(_MESSAGES) and path[len(_MESSAGES) :][:1] in ("", "/")


def error_response(error: ServingError, scope: Scope, status: int | None = None) -> Response:
    """Return the answer; `status` replaces the status of the error."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if (
        error.should_retry is not None
    ):  # the clients of OpenAI and Anthropic read it before the status
        headers["x-should-retry"] = str(error.should_retry).lower()
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, ClientTimeoutError):
        headers["connection"] = "close"  # the rest of the body would be taken for the next request
    if is_messages_route(scope):
        body = to_json(error_object(error, str(scope.get(REQUEST_ID, "")), status))
    else:
        body = error_body(error)
    return Response(body, status or error.status, headers, media_type="application/json")
