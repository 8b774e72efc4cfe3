"""How fast the vision tower may go on beside the steps of the group. Knows no tower.

On a GPU the tower's kernels take SMs of a step that runs beside them, and every rank waits for the slowest. So between
two steps with decodes the tower computes as many blocks as a limit of tokens allows, and otherwise it never waits.
"""

import threading

PATIENCE_S = 0.5
"""After this time the tower goes on: a step may take longer, when kernels compile or a graph is captured."""


class Pace:
    """`take` belongs to the thread of the tower, all other methods to the step loop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: float | None = None  # tokens until the next step; None: no limit
        self._took = False

    def stepped(self, num_tokens: float) -> None:
        """Let the tower compute all blocks of `num_tokens` tokens beside the step that was launched now.

        What its last piece took beyond the limit of an earlier step is taken off.
        """
        with self._changed:
            self._left = num_tokens + min(0.0, self._left or 0.0)
            self._changed.notify_all()

    def free(self) -> None:
        """Let the tower go on without waiting: no stream waits for the step, no step runs, or the tower is to end."""
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def take(self, num_tokens: float) -> None:
        """Wait until work of this size may begin. The last piece beside a step may exceed what is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._left is None or self._left > 0, PATIENCE_S)
            self._took = True
            if self._left is not None:
                self._left -= num_tokens

    def took(self) -> bool:
        """Return whether work has begun since the last call."""
        with self._changed:
            took, self._took = self._took, False
            return took
