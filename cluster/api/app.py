"""The FastAPI application: routes, and the one place where errors become answers. Knows nothing of Ray."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cluster.api.admission import AdmissionGate, make_gate
from cluster.api.auth import ApiKeyAuth
from cluster.api.backend import EngineBackend
from cluster.api.error_format import error_response
from cluster.api.messages.routes import add_messages_routes
from cluster.api.middleware import RequestContext
from cluster.api.offload import Offload
from cluster.api.pooling.draft import check_pooling
from cluster.api.pooling.routes import add_pooling_routes
from cluster.api.record import Recorder
from cluster.api.request.draft import Draft, Drafter
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.request.protocol import ChatRequest, CompletionRequest
from cluster.api.request.sender import Sender
from cluster.api.request.uploads import Uploads
from cluster.api.responses.factory import ResponseFactory
from cluster.api.responses.routes import add_responses_routes
from cluster.api.responses.store import make_store
from cluster.api.routes.adapters import add_adapter_routes
from cluster.api.routes.admin import OperatorBodies, add_admin_routes
from cluster.api.routes.generation import GenerationEndpoint, Prepared, with_writer
from cluster.api.routes.metrics_routes import add_metrics_routes
from cluster.api.routes.models import add_model_routes
from cluster.api.routes.openapi import body_schema, complete_openapi
from cluster.api.routes.other_models import add_other_routes
from cluster.api.routes.page import add_page_routes
from cluster.api.routes.tokenization import add_tokenization_routes
from cluster.api.routes.utility import add_utility_routes
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.errors import BadRequestError, NotFoundError, ServingError
from cluster.metrics.metrics import IngressMetrics
from workers.stats.versions import phalanx_version

BackendProvider = Callable[[], EngineBackend]


def create_app(
    backend_provider: BackendProvider,
    tokenizer: ServingTokenizer,
    settings: ApiSettings | None = None,
    gate: AdmissionGate | None = None,
    recorder: Recorder | None = None,
) -> FastAPI:
    """Build an application that serves the engine of `backend_provider`.

    The provider is called for every request; it may raise EngineDeadError until an engine is ready.
    The owner of `gate` can close it and wait for the open requests.
    """
    settings = settings or ApiSettings()
    gate = gate or make_gate(settings)
    recorder = recorder or Recorder(IngressMetrics())
    metrics = recorder.metrics
    # FastAPI's own page at /docs loads its scripts from other servers.
    app = FastAPIOffline(
        title="Phalanx",
        version=phalanx_version(),
        redirect_slashes=False,
        redoc_url=None,
        static_url="/web/docs",
    )
    _add_middleware(app, settings, metrics)
    _add_error_handlers(app)
    drafter = Drafter(tokenizer, settings)
    offload = Offload(drafter)
    factory = GenerationFactory(drafter, offload.grammars)
    uploads = Uploads(settings)
    endpoint = GenerationEndpoint(backend_provider, settings, recorder, gate, uploads)
    if settings.pooling is None:
        _add_generation_routes(app, endpoint, offload, factory)
        add_messages_routes(app, endpoint, offload, uploads, factory, backend_provider, settings)
        store = make_store(settings)
        responses = ResponseFactory(factory, store)
        add_responses_routes(app, endpoint, offload, responses, store, settings)
    else:
        check_pooling(drafter)
        add_pooling_routes(app, endpoint, offload, settings)
    add_other_routes(app, settings.pooling)
    add_model_routes(app, backend_provider)
    add_tokenization_routes(app, backend_provider, offload, uploads, settings)
    add_utility_routes(app, backend_provider, settings, gate)
    add_metrics_routes(app, backend_provider, settings, metrics)
    add_page_routes(app)
    bodies = OperatorBodies(uploads, settings)
    add_admin_routes(app, backend_provider, bodies)
    add_adapter_routes(app, backend_provider, bodies)
    complete_openapi(app, with_keys=bool(settings.keys.clients))
    return app


def _add_middleware(app: FastAPI, settings: ApiSettings, metrics: IngressMetrics) -> None:
    """Add the middleware; the last added is the outermost."""
    app.add_middleware(ApiKeyAuth, keys=settings.keys)
    app.add_middleware(RequestContext, metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )


def _add_generation_routes(
    app: FastAPI, endpoint: GenerationEndpoint, offload: Offload, factory: GenerationFactory
) -> None:
    async def prepare(draft: Draft, backend: EngineBackend, sender: Sender) -> Prepared:
        return with_writer(await factory.generation(draft, backend, sender))

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""

        return await endpoint.answer(request, offload.drafts(Drafter.completion), prepare)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""

        return await endpoint.answer(request, offload.drafts(Drafter.chat), prepare)


def _add_error_handlers(app: FastAPI) -> None:
    """Starlette picks the handler of the nearest base class."""

    async def serving_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServingError)
        return error_response(error, request.scope)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path[:200]}"
        if error.status_code == 404:
            return error_response(NotFoundError(f"no such route: {what}"), request.scope)
        code = "method_not_allowed" if error.status_code == 405 else None
        problem = BadRequestError(f"{error.detail}: {what}", code=code)
        response = error_response(problem, request.scope, error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # to a closed connection; counted in metrics

    async def internal_error(request: Request, _error: Exception) -> Response:
        message = "internal error; the server's log has the details"
        return error_response(ServingError(message), request.scope)

    app.add_exception_handler(ServingError, serving_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, internal_error)
