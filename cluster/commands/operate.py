"""`phalanx drain`, `scale`, `restart` and `role`: requests to the routes of operators of a running server."""

import json
import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from cluster.commands.server_url import base_url, refusal

TIMEOUT_S = 1800.0
"""Processes that load a large model take minutes; the server has limits of its own."""


class OperationError(RuntimeError):
    """The server refused or could not make the change, or there is no server at the URL."""


def post(url: str, operation: str, body: dict[str, Any], api_key_env: str) -> dict[str, Any]:
    """POST /admin/OPERATION and return the answer. Raises OperationError, and ValueError for text that is no URL."""
    target = f"{base_url(url)}/admin/{operation}"
    headers = {"content-type": "application/json"}
    key = os.environ.get(api_key_env)
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(target, json.dumps(body).encode(), headers), timeout=TIMEOUT_S) as got:
            answer: dict[str, Any] = json.load(got)
            return answer
    except HTTPError as error:
        raise OperationError(refusal(error, api_key_env)) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise OperationError(f"no answer from {target}: {reason}") from error
