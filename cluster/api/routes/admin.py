"""Routes of operators: POST /admin/drain, /admin/scale and /admin/restart. Each answers when the change is made.

A key for the API is a key for these routes. Without keys only this machine may call them.
"""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.backend import EngineBackend
from cluster.api.request.json_body import read_json_object
from cluster.api.request.protocol import as_bad_request
from cluster.api.settings import ApiSettings
from cluster.errors import ForbiddenError


class DrainRequest(BaseModel):
    """POST /admin/drain."""

    model_config = ConfigDict(strict=True, extra="forbid")

    timeout_s: float | None = Field(None, ge=0)


class ScaleRequest(BaseModel):
    """POST /admin/scale."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ranks: int = Field(ge=1)


class RestartRequest(BaseModel):
    """POST /admin/restart. `set`: settings as in `phalanx serve --set`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    set: list[str] = Field(default_factory=list)


T = TypeVar("T", bound=BaseModel)


def add_admin_routes(
    app: FastAPI, backend_provider: Callable[[], EngineBackend], settings: ApiSettings
) -> None:
    """Add the routes; they are no part of the API's document, which clients read."""

    async def parse(request: Request, kind: type[T]) -> T:
        if not settings.api_key_digests and not _is_local(request):
            raise ForbiddenError(
                f"without API keys {request.url.path} answers to this machine alone; set PHALANX_API_KEY or "
                "serve.api_keys_file on the server"
            )
        try:
            return kind.model_validate(await read_json_object(request, settings))
        except ValidationError as error:
            raise as_bad_request(error) from None

    @app.post("/admin/drain", include_in_schema=False)
    async def drain(request: Request) -> Response:
        """Refuse new requests, finish the open ones, end the server."""
        wanted = await parse(request, DrainRequest)
        await backend_provider().drain(wanted.timeout_s)
        return _done({"status": "draining"})

    @app.post("/admin/scale", include_in_schema=False)
    async def scale(request: Request) -> Response:
        """Go on with another number of ranks."""
        wanted = await parse(request, ScaleRequest)
        await backend_provider().scale(wanted.ranks)
        return _done({"status": "done", "ranks": wanted.ranks})

    @app.post("/admin/restart", include_in_schema=False)
    async def restart(request: Request) -> Response:
        """Replace the processes of all ranks."""
        wanted = await parse(request, RestartRequest)
        await backend_provider().restart(wanted.set)
        return _done({"status": "done"})


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _done(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")
