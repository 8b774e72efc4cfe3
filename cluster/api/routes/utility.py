"""Routes for probes, load balancers and people: liveness, readiness, load, version.

Knows nothing of generation.
"""

import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from cluster.api.admission import AdmissionGate
from cluster.api.answer.events import error_body, to_json
from cluster.api.backend import EngineBackend
from cluster.api.routes.readiness import Readiness
from cluster.api.routes.shared_answer import SharedAnswer
from cluster.api.settings import ApiSettings
from cluster.errors import EngineDeadError, ServingError
from workers.stats.versions import phalanx_version


def add_utility_routes(
    app: FastAPI,
    backend_provider: Callable[[], EngineBackend],
    settings: ApiSettings,
    gate: AdmissionGate,
) -> None:
    """Add the routes. Probes may be HEAD requests, too."""
    readiness = Readiness(backend_provider, settings)

    async def state() -> tuple[int, bytes, dict[str, str]]:
        groups = await readiness.groups()
        try:
            if gate.closed:
                raise EngineDeadError(gate.closed)
            await readiness.check(groups)
        except ServingError as error:
            body = json.loads(error_body(error)) | {"status": "not ready", "groups": groups}
            headers = {"retry-after": str(error.retry_after_s or 1)}
            return error.status, to_json(body), headers
        return 200, to_json({"status": "ready", "groups": groups}), {}

    shared = SharedAnswer(state, settings.stats_fresh_s)

    async def ready() -> Response:
        """200 when every rank has given a token within the last seconds, else 503 with the reason.

        `groups`: state, its start (Unix seconds) and seconds; stage and progress of a start or rebuild; epoch; number
        of rebuilds with their seconds by stage, and the last one; seconds since the last vote of each rank.
        """
        # A load balancer must learn of the end at once.
        status, body, headers = await (state() if gate.closed else shared.get())
        return Response(body, status, headers, media_type="application/json")

    async def live() -> Response:
        """200 while this process answers, whatever the state of the ranks."""
        return _json({"status": "alive"})

    # The load balancers of some clouds query /ping, by GET or POST.
    probes = {"/live": live, "/ready": ready, "/health": ready, "/ping": ready}
    for path, answer in probes.items():
        app.get(path)(answer)
        other = ["HEAD", "POST"] if path == "/ping" else ["HEAD"]
        app.api_route(path, methods=other, include_in_schema=False)(answer)

    @app.get("/version")
    async def version() -> Response:
        """The server's version."""
        return _json({"version": phalanx_version()})

    @app.get("/load")
    async def load() -> Response:
        """Requests that run or wait in this ingress."""
        return _json({"server_load": gate.num_requests})


def _json(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")
