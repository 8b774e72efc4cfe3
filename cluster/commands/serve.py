"""`phalanx serve`: start Ray, the ranks and the HTTP endpoint, show the progress, serve until a signal.

SIGTERM lets open requests finish, for serve.drain_timeout_s at most. SIGINT, or a second signal, ends them.
"""

import errno
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console

from cluster.commands.preflight import Preflight
from cluster.commands.start import POLL_S, RankStart, ServerError, ray_get
from cluster.commands.stop_signals import StopSignals
from cluster.config.api_keys import OPERATOR_VARIABLE, VARIABLE, KeyDigests, load_digests
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import check_num_ranks
from kernels.host.owned import start_thread
from workers.log import set_up_logging

HTTP_STOP_S = 5.0  # time for a running call of Serve to return
DRAIN_EXTRA_S = 3.0  # time for an ingress to close its connections and report

console = Console(highlight=False, markup=False)  # errors of libraries contain brackets


def run_server(config: PhalanxConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ServerError when the start or the ranks fail. Raises ConfigError, ApiKeyError and BackendChoiceError when the
    configuration does not fit this machine.
    """
    started = time.monotonic()
    set_up_logging("server", config.serve.log_level, config.serve.log_format)
    stop = StopSignals()
    stop.install()
    keys = load_digests(config.serve.api_keys_file)
    for variable in (VARIABLE, OPERATOR_VARIABLE):
        os.environ.pop(variable, None)  # Ray's processes inherit the environment, and need no keys
    check_num_ranks(config)
    port = _hold_port(config)
    preflight = Preflight(config, len(keys.clients))
    ranks = RankStart(config, stop, preflight, console)
    try:
        ray_started = ranks.start_ray()
        stop.install()  # again, because Ray has replaced the handlers
        with ranks.explained():
            url = _start(config, keys, stop, ranks) if ray_started else None
        if url is not None:
            number = f", {len(keys.clients)} API key(s)" if keys.clients else ""
            console.print(
                f"ready in {time.monotonic() - started:.1f} s: {url}{number}", style="bold"
            )
            while not stop.wait(1.0) and not ranks.draining:
                ranks.check()
                ranks.supervisor.launcher_heartbeat.remote()
            _drain(config, stop, ranks)
    finally:
        try:
            ranks.shut_down(lambda: _delete_application(config))
        finally:
            preflight.close()  # after the ranks, which would compile in its place
            if port is not None:
                port.close()


def _start(
    config: PhalanxConfig, keys: KeyDigests, stop: StopSignals, ranks: RankStart
) -> str | None:
    """Start the ranks and HTTP side by side. Returns the URL, or None after a signal."""
    if not ranks.create():
        return None
    failure: list[BaseException] = []
    calling_serve = threading.Lock()
    start_http = partial(_start_http, config, keys, stop, calling_serve)
    http = start_thread(start_http, failure.append, "start-http")

    def http_is_ready() -> bool:
        if failure:
            raise ServerError(f"HTTP: {failure[0]}") from failure[0]
        return not http.is_alive()

    try:
        serves = ranks.follow("http", http_is_ready)
    except BaseException:
        stop.set()
        raise
    finally:
        # A call of Serve starts a new Ray if none runs, so none may come after ray.shutdown.
        if stop.is_set():
            calling_serve.acquire(timeout=HTTP_STOP_S)
    scheme = "http" if config.serve.tls_cert_file is None else "https"
    return f"{scheme}://{_url_host(config.serve.host)}:{config.serve.port}" if serves else None


def _start_http(
    config: PhalanxConfig,
    keys: KeyDigests,
    stop: StopSignals,
    calling_serve: threading.Lock,
) -> None:
    from ray import serve

    from cluster.ingress.ingress import deploy

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with calling_serve:
        if stop.is_set():
            return
        serve.start(proxy_location="Disabled")
        name = config.serve.app_name
        app = deploy(config, listen=True, keys=keys)
        # No route: the application listens by itself, and each route of a Serve belongs to one application.
        target = serve.RunTarget(app, name=name, route_prefix=None)
        if not stop.is_set():
            serve.run_many([target], wait_for_applications_running=False)
        while not stop.is_set():
            application = serve.status().applications[name]
            if application.status == "RUNNING":
                return
            if application.status == "DEPLOY_FAILED":
                raise RuntimeError(_deploy_failure(application))
            time.sleep(POLL_S)


def _deploy_failure(application: Any) -> str:
    """Why Serve gave up an application: the last line of its deployment's message, which goes to the log.

    The application's own message only names the deployment.
    """
    messages = [deployment.message for deployment in application.deployments.values()]
    message = next((text for text in messages if text), application.message).strip()
    if "\n" in message:
        logging.getLogger(__name__).error("%s", message)
    return str(message.splitlines()[-1])


def _drain(config: PhalanxConfig, stop: StopSignals, ranks: RankStart) -> None:
    """Refuse new requests. Return when the last one has ended, at the timeout, or at a second signal."""
    from ray.exceptions import RayError

    timeout_s = config.serve.drain_timeout_s if stop.patient else 0.0
    with ranks.stage("drained"), console.status("finishing requests"), suppress(RayError):
        if ranks.draining and not stop.is_set():  # by `phalanx drain`
            timeout_s = ray_get(ranks.supervisor.drain_requested.remote())
        else:
            ray_get(ranks.supervisor.drain.remote(timeout_s))
        deadline = time.monotonic() + timeout_s + DRAIN_EXTRA_S
        while time.monotonic() < deadline and not ray_get(ranks.supervisor.is_drained.remote()):
            if timeout_s and stop.is_set() and not stop.patient:
                return
            time.sleep(POLL_S)


def _delete_application(config: PhalanxConfig) -> None:
    """Delete the application of a Ray that continues, and Serve if it is unused; a local Ray ends both.

    A Serve without proxies would start none for a later `serve deploy`, which then answers nothing.
    """
    if config.cluster.ray_address is not None:
        from ray import serve
        from ray.serve.exceptions import RayServeException

        with suppress(RayServeException):  # the start failed before Serve ran
            serve.delete(config.serve.app_name)
            status = serve.status()
            if not status.applications and not status.proxies:
                serve.shutdown()  # type: ignore[no-untyped-call]


def _hold_port(config: PhalanxConfig) -> socket.socket | None:
    """Check that serve.host:serve.port is free, and reserve it for the ingress until the socket is closed.

    Ray's start takes seconds, in which the system could give the port to another process. Returns None for a joined
    Ray: its processes may run under another user, and then the port cannot be shared. Raises ServerError.
    """
    host, port = config.serve.host, config.serve.port
    try:
        _bind(host, port, socket.SO_REUSEADDR).close()
    except OSError as error:
        wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "serve.host must be an address of this machine"
            if wrong_host
            else "choose another with --set serve.port=NUMBER"
        )
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
    if config.cluster.ray_address is not None:
        return None
    try:
        # Without SO_REUSEADDR the socket also stops the check of a second server.
        return _bind(host, port, socket.SO_REUSEPORT)
    except OSError:  # closed connections of another program are in TIME_WAIT
        return _bind(host, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bind(host: str, port: int, *options: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
