"""Moves of experts between ranks while the engine serves: staged layer by layer in a thread, committed by the vote.

Each rank stages the weights of layers that it lacks into spare memory, and votes for how many it has. The plan of a
step lets all ranks commit the layers that all of them have staged, between two steps: weights and map together. A layer
that is not committed leaves no trace, so a move that is cancelled leaves a whole map: that of the layers committed.
Knows nothing of weights: the stager does.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from kernels.host.owned import start_thread
from workers.engine.staging_pace import Pace, Rests
from workers.specs.expert_layout import ExpertMove
from workers.step.step_sync import StepPlan

logger = logging.getLogger(__name__)

STALL_S = 20.0
"""Seconds of steps without progress after which a rank votes to cancel a move. The rests of a layer are far shorter."""
MAX_PAUSE_S = 1.0  # between two votes counts as stepping; longer, the group has slept
LEAVE_S, CLOSE_S = 0.02, 5.0  # for the stager of a move that has ended


class Stager(Protocol):
    """Stages and commits the layers of one rank.

    pace   of staging one layer
    """

    pace: Pace

    def fits(self, layer: int, slots: tuple[int, ...], waiting: Sequence[Any]) -> bool:
        """Return whether a layer has room beside those that wait for their commit; True if none waits."""

    def stage(
        self,
        layer: int,
        slots: tuple[int, ...],
        waiting: Sequence[Any],
        rest: Callable[[], None],
    ) -> Any:
        """Read the experts of this rank that a layer's new map adds, into spare memory. In any thread; may raise.

        waiting   what earlier calls have returned, if it may still wait for its commit: its memory is in use
        rest      called between pieces of work, keeps the pace
        """

    def settled(self) -> bool:
        """Return whether what was committed before is in place, also on the device."""

    def commit(self, staged: Any) -> None:
        """Put what `stage` has returned in the place of the layer's weights and map. In the thread of the steps."""


class ExpertMoves:
    """The moves of one rank in one epoch. `vote` and `act` belong to the step loop; all else may be called anywhere.

    committed   layers, cancelled and completed: moves, since the epoch began
    """

    def __init__(
        self,
        stager: Stager | None = None,
        *,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.committed = self.cancelled = self.completed = 0
        self._stager, self._stall_s, self._clock = stager, stall_s, clock
        self._changed = threading.Condition()
        self._move: ExpertMove | None = None
        self._thread: threading.Thread | None = None
        self._staged: deque[Any] = deque()  # what to commit, of the layers from `_next` on
        self._next = 0  # layers committed
        self._error, self._started = "", True
        self._staging = False  # a thread may write to the spare memory, also one of an earlier move
        self._ended = 0  # the last move that has ended here
        self._waited_s = self._voted_at = 0.0

    def counts(self) -> dict[str, int]:
        """Return the statistics: layers committed, moves completed and cancelled, and whether one runs."""
        return {
            "expert_layers_moved": self.committed,
            "expert_moves": self.completed,
            "expert_moves_cancelled": self.cancelled,
        }

    @property
    def number(self) -> int:
        """The number of the move that runs; 0 without one."""
        move = self._move
        return 0 if move is None else move.number

    @property
    def ended(self) -> int:
        """The number of the last move that has ended; 0 before the first."""
        return self._ended

    def between_commits(self) -> AbstractContextManager[object]:
        """Return what keeps layers from being committed, for a short time."""
        return self._changed

    def begin(self, move: ExpertMove) -> None:
        """Begin to stage a move. One that was cancelled meanwhile is ignored.

        Raises ValueError while another move runs.
        """
        assert move.layers and move.number > 0 and self._stager is not None
        with self._changed:
            if self._move is None:
                self._changed.wait_for(lambda: not self._staging, LEAVE_S)
            if move.number <= self._ended:
                return
            if self._move is not None:
                raise ValueError(f"move {self._move.number} of experts runs")
            self._move, self._staged, self._next, self._error = move, deque(), 0, ""
            self._waited_s, self._started = 0.0, False
            if self._staging:
                self._error = "the stager of a move that was cancelled still runs"

    def vote(self) -> dict[str, int]:
        """Return the fields of this rank's vote."""
        now = self._clock()
        with self._changed:
            if self._move is None:
                self._voted_at = now
                return {}
            self._waited_s += min(now - self._voted_at, MAX_PAUSE_S)
            self._voted_at = now
            assert self._stager is not None
            if not self._started and not self._error and not self._stager.settled():
                return {}  # peers would read what is overwritten
            stalled = self._error or self._waited_s > self._stall_s
            return {
                "move": self._move.number,
                "move_staged": self._next + len(self._staged),
                "move_cancel": self._move.number if stalled else 0,
            }

    def act(self, plan: StepPlan) -> None:
        """Commit or cancel as all ranks do in this step, before it is launched."""
        if plan.move_cancelled:
            self._cancel(plan)
        elif plan.move_commit:
            self._commit(plan.move_commit)
        if not self._started:
            self._start(plan.move)

    def _start(self, number: int) -> None:
        """Begin to stage when all ranks have the move, because what they committed before is in place then."""
        with self._changed:
            move = self._move
            if move is not None and move.number == number and not self._error:
                self._started = True
                self._thread = start_thread(
                    lambda: self._run(move), lambda error: self._fail(move, error), "expert-moves"
                )

    def _commit(self, num_layers: int) -> None:
        """Commit the layers up to this number, which includes those of earlier steps."""
        with self._changed:
            if num_layers == self._next:
                return
            assert self._move is not None and self._stager is not None
            while self._next < num_layers:
                self._stager.commit(self._staged.popleft())
                self._next += 1
                self.committed += 1
            self._waited_s = 0.0
            if self._next == len(self._move.layers):
                self.completed += 1
                self._end(self._move.number)
            self._changed.notify_all()

    def _cancel(self, plan: StepPlan) -> None:
        number = plan.move_cancelled
        with self._changed:
            move = self._move
            if number <= self._ended:
                return
            self.cancelled += 1
            done = f"{self._next} of {len(move.layers)} layers" if move is not None else "none"
            reason = self._error or (
                f"ranks {list(plan.move_late)} have not staged the next layer"
                if plan.move_late
                else "no progress"
            )
            logger.warning("move %d of experts is cancelled after %s: %s", number, done, reason)
            self._end(number)
            self._changed.notify_all()

    def _end(self, number: int) -> None:
        self._ended = max(self._ended, number)
        if self._move is not None and self._move.number <= number:
            self._move, self._staged = None, deque()

    def _run(self, move: ExpertMove) -> None:
        assert self._stager is not None
        for layer, slots in move.layers:
            waiting = self._room(move, layer, slots)
            if waiting is None:
                return
            rest = Rests(self._stager.pace, partial(self._rest, move))
            try:
                staged = self._stager.stage(layer, slots, waiting, rest)
            finally:
                self._leave()
            with self._changed:
                if self._move is not move:
                    return
                self._staged.append(staged)
            rest()

    def _rest(self, move: ExpertMove, seconds: float) -> None:
        """Wait for so many seconds, or until the move has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._move is not move, seconds)

    def _room(self, move: ExpertMove, layer: int, slots: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Wait until a layer has room beside those that wait for their commit; None: the move has ended.

        Its memory is in use until `_leave`.
        """
        assert self._stager is not None
        with self._changed:
            while self._move is move and not self._stager.fits(layer, slots, self._staged):
                self._changed.wait()
            if self._move is not move:
                return None
            self._staging = True
            return tuple(self._staged)

    def _leave(self) -> None:
        with self._changed:
            self._staging = False
            self._changed.notify_all()

    def _fail(self, move: ExpertMove, error: BaseException) -> None:
        with self._changed:
            if self._move is move:
                self._error = f"{type(error).__name__}: {error}"
                logger.warning("experts cannot be staged", exc_info=error)

    def close(self) -> bool:
        """End the move that runs; return whether its thread writes to no memory any more."""
        with self._changed:
            self._move, self._staged = None, deque()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        return not self._staging
