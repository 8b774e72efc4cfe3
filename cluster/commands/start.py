"""Starts Ray and the ranks, shows the progress, and stops them: shared by `serve`, `trace` and offline use."""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.commands import download, reaper
from cluster.commands.console_logs import show_logs
from cluster.commands.preflight import Preflight
from cluster.commands.stop_signals import StopSignals
from cluster.config.phalanx_config import PhalanxConfig
from kernels.host.cuda_environment import MULTICAST_OFF
from workers.rank.rank_info import IN_BYTES

if TYPE_CHECKING:
    from cluster.supervisor.status import GroupHealth, GroupStatus

# Read when Ray starts; a variable that the operator has set is kept. Ray starts workers at niceness 15, where any other
# process of the machine slows the ranks down. Serve's controller checks its replicas ten times a second, which takes
# 5 % of a core; three times are enough because the replicas rarely change. A spare process imports torch as it starts.
# Ray looks for dead processes once a second, and reserves the place of a dead rank until then. Its GCS keeps records of
# the last 100,000 calls, about 100 MB.
RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_preload_python_modules": "cluster.supervisor.preload",
    "RAY_raylet_check_for_unexpected_worker_disconnect_interval_ms": "100",
    "RAY_task_events_max_num_task_in_gcs": "1000",
}
# Ray logs at every start that its token authentication is on, which is the default.
AUTH_LOGGER = "ray._private.authentication.authentication_token_setup"
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # only small messages travel
VITAL = ("gcs_server", "raylet")
POLL_S = 0.1
ANSWER_S = 1.0  # time for the supervisor to answer in a check
SILENT_CHECKS = 10  # checks without an answer before a warning
logger = logging.getLogger(__name__)


class ServerError(RuntimeError):
    """The ranks cannot start, or had to stop; the message is the reason."""


class RankStart:
    """The ranks of one configuration: `start_ray`, `create`, `follow`, `check` from time to time, `shut_down`.

    Raises ServerError when the start or the ranks fail. The configuration is checked meanwhile, in `preflight`.
    """

    def __init__(
        self, config: PhalanxConfig, stop: StopSignals, preflight: Preflight, console: Console
    ):
        self._config = config
        self._stop = stop
        self._preflight = preflight
        self._console = console
        self.supervisor: Any = None
        self._owns_ray = False
        self._reported: dict[int, int] = defaultdict(int)  # stages, by group
        self._healths: list[GroupHealth] = []  # at the last check
        self._asked: Any = None  # the call for the healths that has no answer yet
        self._num_silent = 0  # checks in a row without that answer

    def start_ray(self) -> bool:
        """Fetch weights that ranks here lack, then start a local Ray or join one. Returns False after a signal."""
        if download.is_needed(self._config):
            with self.stage("download"):
                download.run(self._config, self._stop.is_set)
        if self._stop.is_set():
            return False
        with self.stage("ray"):
            start_ray(self._config, self._stop.is_set)
        self._owns_ray = True
        return not self._stop.is_set()

    def create(self) -> bool:
        """Create the supervisor, which creates the ranks. Returns False after a signal."""
        import ray

        from cluster.supervisor import actor

        try:
            self.supervisor = actor.create(self._config)
        except ValueError as error:
            raise ServerError(str(error)) from error
        started = self.supervisor.start.remote(self._config)
        while not ray.wait([started], timeout=POLL_S)[0]:
            if self._stop.is_set():
                return False
        ray.get(started)
        return True

    def follow(self, what: str, beside: Callable[[], bool]) -> bool:
        """Print each stage when it ends, until the ranks serve. Returns False after a signal.

        beside: whether `what`, which starts beside the ranks, is ready; may raise.
        """
        ranks_ready = time.monotonic()
        with self._console.status("starting ranks") as line:
            while not self._stop.is_set():
                if self._preflight.done():
                    self.print_warnings()
                statuses: list[GroupStatus] = ray_get(self.supervisor.status.remote())
                self._report_stages(statuses)
                ready = beside()
                starting = [status for status in statuses if status.state != "serving"]
                if starting:
                    ranks_ready = time.monotonic()
                    line.update(progress_line(starting[0].stage, *starting[0].progress))
                elif self._preflight.done() and ready:
                    self.print_warnings()
                    self._report(what, time.monotonic() - ranks_ready)
                    self._healths = [status.health for status in statuses]
                    for text in dict.fromkeys(map(_sizes, statuses)):
                        self._console.print(f"  {text}")
                    return True
                else:
                    line.update(f"waiting for {what}")
                time.sleep(POLL_S)
        return False

    def check(self) -> None:
        """Print what has changed in the groups since the last check.

        Raises ServerError when all groups, the supervisor, or a process that the local Ray needs have ended.
        """
        if lost := lost_ray_process():
            raise ServerError(f"Ray's process {lost} has ended, and Ray cannot go on without it")
        healths = self._latest_healths()
        if healths is None:
            return
        if all(health.ended for health in healths):
            raise ServerError("; ".join(dict.fromkeys(health.error for health in healths)))
        for before, health in zip(self._healths or healths, healths, strict=True):
            if health != before:
                role = "" if health.role == before.role else f", role {health.role}"
                state = f"{health.state}, epoch {health.epoch}{role}"
                self._console.print(
                    f"{state}: {health.error}" if health.error else state, soft_wrap=True
                )
        self._healths = healths

    def _latest_healths(self) -> "list[GroupHealth] | None":
        """Return the healths; None while the supervisor does not answer.

        A supervisor that waits for Ray's GCS, or that Ray starts again, answers later, and the ranks serve meanwhile.
        """
        import ray
        from ray.exceptions import ActorDiedError

        from cluster.supervisor.failures import failure_message

        if self._asked is None:
            self._asked, self._num_silent = self.supervisor.healths.remote(), 0
        if not ray.wait([self._asked], timeout=ANSWER_S)[0]:
            self._num_silent += 1
            if self._num_silent == SILENT_CHECKS:
                logger.warning("the supervisor does not answer; the ranks serve meanwhile")
            return None
        asked, self._asked = self._asked, None
        try:
            healths: list[GroupHealth] = ray.get(asked)
        except ActorDiedError as error:
            # For good: it ends itself when this process was stopped for long.
            raise ServerError(f"the supervisor has ended: {failure_message(error)}") from error
        return healths

    @property
    def draining(self) -> bool:
        """Whether a client requested the end of the server, at the last check."""
        states = {health.state for health in self._healths}
        return "draining" in states and states <= {"draining", "failed", "stopped"}

    def shut_down(self, beside: Callable[[], None] = lambda: None) -> None:
        """Stop the ranks, call `beside`, then end a local Ray or leave a joined one."""
        if not self._owns_ray:
            return
        self._owns_ray = False
        import ray

        # Ray logs an error for every thread that waits for a call when Ray ends.
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        with self.stage("stopped"):
            if lost_ray_process():
                reaper.end_session()  # calls of Ray would wait for a minute
            else:
                if self.supervisor is not None:
                    self._stop_ranks(self.supervisor)
                    beside()
                    self._stop_successor()
            ray.shutdown()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the error of the check in place of an error of the block, because it explains the failure better."""
        try:
            yield
        except Exception:
            self.print_warnings()
            raise

    def print_warnings(self) -> None:
        """Print the warnings of the check, once. Raises the error of the check."""
        for warning in self._preflight.warnings():
            self._console.print(f"  warning: {warning}", style="yellow")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print the seconds that the block took."""
        started = time.monotonic()
        yield
        self._report(name, time.monotonic() - started)

    def _stop_successor(self) -> None:
        """End the supervisor that an ingress which started meanwhile has created, if any."""
        from cluster.supervisor.actor import find

        successor = find(self._config)
        # A call of a killed supervisor would be tried again and reported on the console.
        if successor is not None and successor != self.supervisor:
            self._stop_ranks(successor)

    def _stop_ranks(self, supervisor: Any) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            ray.get(supervisor.stop.remote(), timeout=5)
        except RayError as error:  # it has ended, or is late
            logger.debug("the supervisor did not stop: %s", error)
        ray.kill(supervisor)  # its ranks end without it

    def _report_stages(self, statuses: "list[GroupStatus]") -> None:
        for group, status in enumerate(statuses):
            for name, seconds in status.stages[self._reported[group] :]:
                self._report(name, seconds)
            self._reported[group] = len(status.stages)
            if status.state == "failed":
                raise ServerError(status.error)

    def _report(self, name: str, seconds: float) -> None:
        self._console.print(f"  {name:<20}{seconds:6.1f} s")


def _sizes(status: "GroupStatus") -> str:
    """Return the backends and the cache of a group's ranks."""
    info = status.infos[0]  # equal on all ranks of a group
    backends = ", ".join(f"{kind} {name}" for kind, name in info.backends.items())
    return f"{backends}, {info.num_blocks} KV blocks"


def start_ray(config: PhalanxConfig, stopped: Callable[[], bool] = lambda: False) -> None:
    """Start a local Ray, or join the configured one; `ray.shutdown` undoes it. Raises ServerError.

    A local Ray that does not start is started once more, unless `stopped`.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Ray's processes inherit the variables, so a rank can run in a process that Ray has started before.
    os.environ.update(MULTICAST_OFF)
    logging.getLogger(AUTH_LOGGER).setLevel(logging.ERROR)
    import ray

    if ray.is_initialized():
        raise ServerError("Ray already runs in this process; end it first with ray.shutdown()")
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
        reaper.start()
    init = partial(
        ray.init,
        address or "local",
        namespace="phalanx",
        logging_level=logging.WARNING,
        log_to_driver=True,
        **options,
    )
    for last in (address is not None, True):
        try:
            init()
            break
        except Exception as error:  # Ray raises bare Exceptions, also on a slow machine
            if address is None:
                _end_unstarted_ray()
            if last or stopped() or isinstance(error, ValueError):  # a wrong setting fails again
                where = f"join Ray at {address}" if address else "start a local Ray"
                raise ServerError(f"cannot {where}: {error}") from error
            logger.warning("Ray did not start, and is started once more: %s", error)
    show_logs(config.serve.log_format)


def _end_unstarted_ray() -> None:
    """End what a failed start has left: Ray notes the processes of a node when all of them answer."""
    import ray

    ray.shutdown()
    reaper.end_session()


def lost_ray_process() -> str | None:
    """Return the name of a vital process of the local Ray that has ended; None if all live, and for a joined Ray."""
    import ray

    node: Any = ray._private.worker._global_node
    dead: list[tuple[str, Any]] = [] if node is None else node.dead_processes()
    return next((name for name, _ in dead if name in VITAL), None)


def progress_line(stage: str, done: int, total: int) -> str:
    """Return the line of a stage under way; `total` is 0 if unknown."""
    if not total:
        return stage
    filled = round(30 * done / total)
    bar = "#" * filled + "." * (30 - filled)
    if stage in IN_BYTES:
        return f"{stage} {bar} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    return f"{stage} {bar} {done} of {total}"


def ray_get(ref: Any) -> Any:
    """Return the result of a short call of an actor."""
    import ray

    return ray.get(ref, timeout=60)
