"""Sends the requests of a batch to a running server, and sends them again while the server is overloaded or away."""

import asyncio
import json
import random

import httpx

from cluster.offline.batch import Response
from cluster.offline.batch_input import BatchError, Line

ATTEMPTS = 12
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
RETRIED = (429, 502, 503)
JSON = {"Content-Type": "application/json"}


class RemoteServer:
    """A server of the OpenAI API. Its refusals for load never become results: the batch ends, and can resume."""

    def __init__(self, client: httpx.AsyncClient, first_wait_s: float = FIRST_WAIT_S) -> None:
        self._client = client
        self._first_wait_s = first_wait_s

    async def answer(self, line: Line) -> Response:
        """See Server."""
        body = json.dumps(line.body).encode("ascii")
        for attempt in range(ATTEMPTS):
            try:
                found = await self._client.post(line.url, content=body, headers=JSON)
            except httpx.TransportError as error:
                reason, wait = f"cannot reach {self._client.base_url}: {_text(error)}", None
            else:
                if found.status_code == 401:
                    raise BatchError(
                        f"{self._client.base_url} refuses the API key: {_message(found)}"
                    )
                if found.status_code not in RETRIED:
                    return _response(found)
                reason, wait = f"{self._client.base_url}: {_message(found)}", _retry_after(found)
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(self._wait(attempt) if wait is None else wait)
        raise BatchError(f"{reason} ({ATTEMPTS} attempts)")

    def _wait(self, attempt: int) -> float:
        """Return the seconds to wait: twice as long each time, with jitter, so that requests do not come at once."""
        return min(self._first_wait_s * 2.0**attempt, MAX_WAIT_S) * random.uniform(0.5, 1)


def make_client(url: str, api_key: str | None, concurrency: int) -> httpx.AsyncClient:
    """Return the client of the server at `url`, such as http://host:8000; a trailing /v1 is removed."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    base = base if "://" in base else f"http://{base}"
    try:
        return httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise BatchError(f"--url {url!r} is not of the form http://host:port") from error


def _response(found: httpx.Response) -> Response:
    request_id = found.headers.get("x-request-id", "")
    try:
        body = found.json()
    except ValueError:  # of a proxy
        body = {"error": {"message": found.text[:500]}}
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    # Encoded again, because a line break in the body would end the line of the result.
    encoded = json.dumps(body, separators=(",", ":")).encode("ascii")
    return Response(
        found.status_code, request_id, encoded, tokens if isinstance(tokens, int) else 0
    )


def _retry_after(found: httpx.Response) -> float | None:
    value = found.headers.get("retry-after", "")
    return min(float(value), MAX_WAIT_S) if value.isdecimal() else None


def _message(found: httpx.Response) -> str:
    try:
        return str(found.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {found.status_code}"


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
