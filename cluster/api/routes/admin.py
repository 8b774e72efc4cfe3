"""Routes of operators: POST /admin/drain, /admin/scale, /admin/restart and /admin/role.

Each answers when the change is made. They need a key of operators, and are off where the server has none.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from cluster.api.answer.events import to_json
from cluster.api.auth import check_operator
from cluster.api.backend import EngineBackend
from cluster.api.request.json_body import parse_json_object
from cluster.api.request.protocol import as_bad_request
from cluster.api.request.uploads import Uploads
from cluster.api.settings import ApiSettings
from cluster.config.phalanx_config import Role


class OperatorRequest(BaseModel):
    """A body of these routes. `group`: name of the group, as in /ready; may be left out where there is one."""

    model_config = ConfigDict(strict=True, extra="forbid")

    group: str | None = None


class DrainRequest(OperatorRequest):
    """POST /admin/drain: of a group, or of the server without a name."""

    timeout_s: float | None = Field(None, ge=0)


class ScaleRequest(OperatorRequest):
    """POST /admin/scale."""

    ranks: int = Field(ge=1)


class RestartRequest(OperatorRequest):
    """POST /admin/restart. `set`: settings as in `phalanx serve --set`."""

    set: list[str] = Field(default_factory=list)


class RoleRequest(OperatorRequest):
    """POST /admin/role."""

    role: Role


T = TypeVar("T", bound=BaseModel)
_MAX_BODY_BYTES = 64 * 1024  # parsed in the event loop


class OperatorBodies:
    """Reads the bodies of requests of operators, and refuses those of others."""

    def __init__(self, uploads: Uploads, settings: ApiSettings) -> None:
        self._uploads, self._settings = uploads, settings

    async def parse(self, request: Request, kind: type[T]) -> T:
        """Return the checked body. Raises ForbiddenError and BadRequestError."""
        check_operator(request.scope, self._settings.keys)
        async with self._uploads.body(request, _MAX_BODY_BYTES) as body:
            try:
                return kind.model_validate(parse_json_object(body, self._settings.max_json_depth))
            except ValidationError as error:
                raise as_bad_request(error) from None


def add_admin_routes(
    app: FastAPI, backend_provider: Callable[[], EngineBackend], bodies: OperatorBodies
) -> None:
    """Add the routes; they are no part of the API's document, which clients read."""

    @app.post("/admin/drain", include_in_schema=False)
    async def drain(request: Request) -> Response:
        """Refuse new requests, finish the open ones, end the server."""
        wanted = await bodies.parse(request, DrainRequest)
        await backend_provider().drain(wanted.timeout_s, wanted.group)
        return _done({"status": "draining"})

    @app.post("/admin/scale", include_in_schema=False)
    async def scale(request: Request) -> Response:
        """Go on with another number of ranks."""
        wanted = await bodies.parse(request, ScaleRequest)
        await backend_provider().scale(wanted.ranks, wanted.group)
        return _done({"status": "done", "ranks": wanted.ranks})

    @app.post("/admin/restart", include_in_schema=False)
    async def restart(request: Request) -> Response:
        """Replace the processes of all ranks."""
        wanted = await bodies.parse(request, RestartRequest)
        await backend_provider().restart(wanted.set, wanted.group)
        return _done({"status": "done"})

    @app.post("/admin/role", include_in_schema=False)
    async def role(request: Request) -> Response:
        """Let a group have another part of requests."""
        wanted = await bodies.parse(request, RoleRequest)
        await backend_provider().switch_role(wanted.role, wanted.group)
        return _done({"status": "done", "role": wanted.role})


def _done(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")
