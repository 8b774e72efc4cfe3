"""Why a rank ended: the error message for people, and which of several ended ranks is the cause."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError

from kernels.host.awake import LOOKS, AwakeTime
from workers.hub import HubError
from workers.models.config_reader import ModelConfigError
from workers.rank.step_loop import PeerFailedError, RankFailedError
from workers.weights.checkpoint_files import CheckpointError

T = TypeVar("T")

ROOT_CAUSE_WAIT_S = 2.0
"""Time for a second rank to end after a rank that only lost a peer; Ray reports a dead process within a second."""


class StageTimeoutError(ValueError):
    """A stage of the start took longer than the configuration allows."""


class RankDiedError(RuntimeError):
    """The process of a rank died during a call; the message names the rank."""


async def of_rank(rank: int, call: Awaitable[T]) -> T:
    """The result of a call of `rank`. Raises RankDiedError when its process dies."""
    try:
        return await call
    except RayActorError as error:
        if error.actor_init_failed:  # its constructor raised, and would raise again
            raise
        raise RankDiedError(f"rank {rank}: {failure_message(error)}") from error


def failure_message(error: BaseException) -> str:
    """What failed, without the remote traceback that Ray puts around it; the rank's log has the traceback."""
    error = _remote_cause(error)
    if isinstance(error, RayActorError):
        # Ray keeps only the text of an error of the actor's constructor; its last line is the message.
        return str(error).splitlines()[-1] if error.actor_init_failed else "its process died"
    is_explained = isinstance(error, ValueError | RankFailedError | RankDiedError)
    return str(error) if is_explained else f"{type(error).__name__}: {error}"


def step_failed(error: BaseException) -> bool:
    """Whether a rank ended by an error of its own step: neither by a lost peer nor by the end of its process."""
    error = _remote_cause(error)
    return isinstance(error, RankFailedError) and not isinstance(error, PeerFailedError)


def lacks_files(error: BaseException) -> bool:
    """Whether a rank failed without files of the model, or space and descriptors for files: they may come back.

    The error of a lost peer is an OSError too, but not of this kind.
    """
    kinds = CheckpointError | HubError | ModelConfigError | OSError
    return isinstance(_remote_cause(error), kinds) and not lost_a_peer(error)


def lost_a_peer(error: BaseException) -> bool:
    """Whether a rank failed because another rank has left, or did not come."""
    return isinstance(_remote_cause(error), ConnectionError | TimeoutError)


async def first_failure(done: Sequence[asyncio.Future[None]]) -> asyncio.Future[None]:
    """Return the future that ended first.

    A rank that ended because it lost a peer is not the cause: the peer has ROOT_CAUSE_WAIT_S to end too.
    """
    lost_a_peer: list[asyncio.Future[None]] = []
    waiting, awake = set(done), _awake()
    while waiting and (left_s := ROOT_CAUSE_WAIT_S - awake.look()) > 0:
        ended, waiting = await asyncio.wait(
            waiting,
            timeout=min(left_s, awake.longest_s) if lost_a_peer else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if ended:
            awake = _awake()
        for future in ended:
            error = future.exception()
            if error is None or not isinstance(_remote_cause(error), PeerFailedError):
                return future
            lost_a_peer.append(future)
    return lost_a_peer[0]


def _awake() -> AwakeTime:
    return AwakeTime(ROOT_CAUSE_WAIT_S / LOOKS, asyncio.get_running_loop().time)


def _remote_cause(error: BaseException) -> BaseException:
    """The error that was raised remotely, if Ray wrapped one."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return error.cause
    return error
