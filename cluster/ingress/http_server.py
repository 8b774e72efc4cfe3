"""The HTTP server inside an ingress replica. Knows nothing of the application.

Clients connect to this server, not to a proxy of Serve, because Serve's own proxy holds the first token back for 50 ms,
HAProxy's statistics listen on all interfaces, and either adds a process to the way of every token.
"""

import logging
import resource
import socket

import uvicorn
from starlette.types import ASGIApp

from cluster.config.serve_section import ServeConfig
from cluster.ingress.http_protocol import limited_protocol
from kernels.host.owned import OwnedTask

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16384
SHUTDOWN_S = (
    3  # time for requests that are open when the server stops; the ingress has drained before
)


class HttpServer:
    """Serves an ASGI application on serve.host:serve.port; replicas of one node share the port."""

    def __init__(self, app: ASGIApp, config: ServeConfig):
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=limited_protocol(config.limits.client_timeout_s, connections_limit(config)),
                ssl_certfile=config.tls_cert_file,
                ssl_keyfile=config.tls_key_file,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,  # its warnings go to the root logger
                timeout_keep_alive=config.limits.keep_alive_s,  # type: ignore[arg-type]  # a float works too
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._socket = _listen(config.host, config.port)
        self._task: OwnedTask | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start to serve, in the running event loop."""
        # Not serve(): that would install signal handlers, and this process belongs to Ray.
        serving = self._server._serve([self._socket])
        self._task = OwnedTask(serving, self._fail, "http-server", may_end=True)

    def check(self) -> None:
        """Raise RuntimeError when the server has ended."""
        if self._task is None or self._task.done:
            raise RuntimeError("the HTTP server of this ingress has ended") from self._error

    def _fail(self, error: BaseException) -> None:
        logger.error("the HTTP server failed", exc_info=error)
        self._error = error

    async def stop(self) -> None:
        """Close the port, then end open requests. Does nothing a second time or before the start."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task.wait()


def connections_limit(config: ServeConfig) -> int:
    """Return the most open connections: below the limit of open files, because streams of ranks need some too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = files * 3 // 4
    wanted = config.limits.max_connections
    if wanted == "auto":
        return min(most, MAX_CONNECTIONS)
    if wanted > most:
        logger.warning(
            "serve.limits.max_connections = %d is lowered to %d, because the process may open %d files",
            *(wanted, most, files),
        )
    return min(wanted, most)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        reason = f"cannot listen on {host}:{port}: {error.strerror}"
        raise OSError(error.errno, reason) from error
    listener.setblocking(False)
    return listener
