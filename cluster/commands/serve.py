"""`phalanx serve`: start Ray, the ranks and the HTTP endpoint, show the progress, serve until a signal.

SIGTERM lets open requests finish, for serve.drain_timeout_s at most. SIGINT, or a second signal, ends them.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.commands.console_logs import show_logs
from cluster.commands.preflight import Preflight
from cluster.commands.stop_signals import StopSignals
from cluster.config.api_keys import VARIABLE, load_digests
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import check_num_ranks
from kernels.host.cuda_environment import MULTICAST_OFF
from workers.rank.rank_info import WEIGHTS
from workers.stats.log import set_up_logging

if TYPE_CHECKING:
    from cluster.group.group import GroupHealth, GroupStatus

# Read when Ray starts; a variable that the operator has set is kept. Ray starts workers at niceness 15, where any other
# process of the machine slows the ranks down. Serve's controller checks its replicas ten times a second, which takes
# 5 % of a core; three times are enough because the replicas rarely change.
RAY_ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3"}
# Ray logs at every start that its token authentication is on, which is the default.
AUTH_LOGGER = "ray._private.authentication.authentication_token_setup"
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # only small messages travel
POLL_S = 0.1
HTTP_STOP_S = 5.0  # time for a running call of Serve to return
DRAIN_EXTRA_S = 3.0  # time for an ingress to close its connections and report

console = Console(highlight=False)


class ServerError(RuntimeError):
    """The server cannot start, or had to stop; the message is the reason."""


def run_server(config: PhalanxConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ServerError when the start or the ranks fail. Raises ConfigError, ApiKeyError and BackendChoiceError when the
    configuration does not fit this machine.
    """
    started = time.monotonic()
    set_up_logging("server", config.serve.log_level, config.serve.log_format)
    stop = StopSignals()
    stop.install()
    digests = load_digests(config.serve.api_keys_file)
    os.environ.pop(VARIABLE, None)  # Ray's processes inherit the environment, and need no keys
    check_num_ranks(config)
    port = _hold_port(config)
    preflight = Preflight(config, len(digests))
    try:
        with _stage("ray"):
            start_ray(config)
        stop.install()  # again, because Ray has replaced the handlers
        url = None if stop.is_set() else _start_checked(config, digests, stop, preflight)
        if url is not None:
            keys = f", {len(digests)} API key(s)" if digests else ""
            console.print(f"ready in {time.monotonic() - started:.1f} s: {url}{keys}", style="bold")
            _watch(config, stop)
            _drain(config, stop)
    finally:
        try:
            _shut_down(config)
        finally:
            preflight.close()  # after the ranks, which would compile in its place
            if port is not None:
                port.close()


def _print_warnings(preflight: Preflight) -> None:
    """Print the warnings of the check, once. Raises the error of the check."""
    for warning in preflight.warnings():
        console.print(f"  warning: {warning}", style="yellow")


def start_ray(config: PhalanxConfig) -> None:
    """Start a local Ray, or join the configured one; `ray.shutdown` undoes it. Raises ServerError."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Ray's processes inherit the variables, so a rank can run in a process that Ray has started before.
    os.environ.update(MULTICAST_OFF)
    logging.getLogger(AUTH_LOGGER).setLevel(logging.ERROR)
    import ray

    address = config.cluster.ray_address
    options: dict[str, Any] = {}
    if address is None:
        options = {
            # Not a limit, but Ray starts a process for each core that it counts: one for each rank and replica, the
            # supervisor and Serve's controller.
            "num_cpus": config.cluster.ranks + config.serve.replicas + 2,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        ray.init(
            address or "local",
            namespace="phalanx",
            logging_level=logging.WARNING,
            log_to_driver=True,
            **options,
        )
    except Exception as error:  # Ray raises bare Exceptions, also on a slow machine
        where = f"join Ray at {address}" if address else "start a local Ray"
        raise ServerError(f"cannot {where}: {error}") from error
    show_logs(config.serve.log_format)


def _start_checked(
    config: PhalanxConfig, digests: tuple[bytes, ...], stop: StopSignals, preflight: Preflight
) -> str | None:
    """`_start`; if it fails, errors of the check are raised first, because they explain the failure better."""
    try:
        return _start(config, digests, stop, preflight)
    except Exception:
        _print_warnings(preflight)
        raise


def _start(
    config: PhalanxConfig, digests: tuple[bytes, ...], stop: StopSignals, preflight: Preflight
) -> str | None:
    """Start the ranks and HTTP side by side. Returns the URL, or None after a signal."""
    import ray

    from cluster.group import supervisor

    actor = supervisor.get_or_create(config)
    started = actor.start.remote(config)
    while not ray.wait([started], timeout=POLL_S)[0]:
        if stop.is_set():
            return None
    ray.get(started)
    failure: list[BaseException] = []
    calling_serve = threading.Lock()
    arguments = (config, digests, stop, calling_serve, failure)
    http = threading.Thread(target=_start_http, args=arguments, daemon=True)
    http.start()
    try:
        return _follow_start(config, actor, http, failure, stop, preflight)
    except BaseException:
        stop.set()
        raise
    finally:
        # A call of Serve starts a new Ray if none runs, so none may come after ray.shutdown.
        if stop.is_set():
            calling_serve.acquire(timeout=HTTP_STOP_S)


def _follow_start(
    config: PhalanxConfig,
    actor: Any,
    http: threading.Thread,
    failure: list[BaseException],
    stop: StopSignals,
    preflight: Preflight,
) -> str | None:
    """Print each stage when it ends, and the warnings of the check when it ends. Returns the URL; None on a signal."""
    ray_get = _ray_get()
    reported: dict[int, int] = defaultdict(int)  # stages, by group
    ranks_ready = time.monotonic()
    with console.status("starting ranks") as line:
        while not stop.is_set():
            if preflight.done():
                _print_warnings(preflight)
            statuses: list[GroupStatus] = ray_get(actor.status.remote())
            for group, status in enumerate(statuses):
                for name, seconds in status.stages[reported[group] :]:
                    _report(name, seconds)
                reported[group] = len(status.stages)
                if status.state == "failed":
                    raise ServerError(status.error)
            if failure:
                raise ServerError(f"HTTP: {failure[0]}") from failure[0]
            starting = [status for status in statuses if status.state != "serving"]
            if starting:
                ranks_ready = time.monotonic()
                line.update(_progress_line(starting[0].stage, *starting[0].progress))
            elif preflight.done() and not http.is_alive():
                _print_warnings(preflight)
                _report("http", time.monotonic() - ranks_ready)
                info = statuses[0].infos[0]
                console.print(f"  {_backends_line(info.backends)}, {info.num_blocks} KV blocks")
                return f"http://{_url_host(config.serve.host)}:{config.serve.port}"
            else:
                line.update("waiting for HTTP")
            time.sleep(POLL_S)
    return None


def _start_http(
    config: PhalanxConfig,
    digests: tuple[bytes, ...],
    stop: StopSignals,
    calling_serve: threading.Lock,
    failure: list[BaseException],
) -> None:
    try:
        from ray import serve

        from cluster.ingress.ingress import deploy

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        with calling_serve:
            if stop.is_set():
                return
            serve.start(proxy_location="Disabled")
            name = config.serve.app_name
            app = deploy(config, listen=True, api_key_digests=digests)
            target = serve.RunTarget(app, name=name, route_prefix="/")
            if not stop.is_set():
                serve.run_many([target], wait_for_applications_running=False)
            while not stop.is_set():
                application = serve.status().applications[name]
                if application.status == "RUNNING":
                    return
                if application.status == "DEPLOY_FAILED":
                    raise RuntimeError(_deploy_failure(application))
                time.sleep(POLL_S)
    except BaseException as error:
        failure.append(error)


def _deploy_failure(application: Any) -> str:
    """Why Serve gave up an application: the last line of its deployment's message, which goes to the log.

    The application's own message only names the deployment.
    """
    messages = [deployment.message for deployment in application.deployments.values()]
    message = next((text for text in messages if text), application.message).strip()
    if "\n" in message:
        logging.getLogger(__name__).error("%s", message)
    return str(message.splitlines()[-1])


def _watch(config: PhalanxConfig, stop: StopSignals) -> None:
    """Return after a signal. Raises ServerError when a group has failed."""
    from cluster.group import supervisor

    ray_get = _ray_get()
    actor = supervisor.get_or_create(config)
    while not stop.wait(1.0):
        healths: list[GroupHealth] = ray_get(actor.healths.remote())
        for health in healths:
            if not health.alive:
                raise ServerError(health.error)


def _drain(config: PhalanxConfig, stop: StopSignals) -> None:
    """Refuse new requests. Return when the last one has ended, at the timeout, or at a second signal."""
    from ray.exceptions import RayError

    from cluster.group import supervisor

    timeout_s = config.serve.drain_timeout_s if stop.patient else 0.0
    with _stage("drained"), console.status("finishing requests"), suppress(RayError):
        ray_get = _ray_get()
        actor = supervisor.get_or_create(config)
        ray_get(actor.drain.remote(timeout_s))
        deadline = time.monotonic() + timeout_s + DRAIN_EXTRA_S
        while time.monotonic() < deadline and not ray_get(actor.is_drained.remote()):
            if timeout_s and not stop.patient:
                return
            time.sleep(POLL_S)


def _shut_down(config: PhalanxConfig) -> None:
    import ray

    if not ray.is_initialized():
        return
    # Ray logs an error for every thread that waits for a call when Ray ends.
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with _stage("stopped"):
        _stop_ranks(config)
        if config.cluster.ray_address is not None:
            from ray import serve

            serve.delete(config.serve.app_name)
        # The end of a local Ray ends Serve too.
        ray.shutdown()


def _stop_ranks(config: PhalanxConfig) -> None:
    import ray
    from ray.exceptions import RayError

    from cluster.group import supervisor

    try:
        actor = ray.get_actor(supervisor.supervisor_name(config), namespace=supervisor.NAMESPACE)
        ray.get(actor.stop.remote(), timeout=5)
        ray.kill(actor)
    except (ValueError, RayError) as error:
        logging.getLogger(__name__).debug("no supervisor to stop: %s", error)


def _ray_get() -> Callable[[Any], Any]:
    import ray

    return lambda ref: ray.get(ref, timeout=60)


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


@contextmanager
def _stage(name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    _report(name, time.monotonic() - started)


def _report(name: str, seconds: float) -> None:
    console.print(f"  {name:<20}{seconds:6.1f} s")


def _progress_line(stage: str, done: int, total: int) -> str:
    if not total:
        return stage
    filled = round(30 * done / total)
    bar = "#" * filled + "." * (30 - filled)
    if stage == WEIGHTS:
        return f"{stage} {bar} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    return f"{stage} {bar} {done} of {total}"


def _backends_line(backends: dict[str, str]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in backends.items())


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
