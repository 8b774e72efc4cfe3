"""How fast the vision tower may go on beside the steps of the group. Knows no tower.

On a GPU the tower's kernels take SMs of a step that runs beside them, and every rank waits for the slowest. So between
two steps the tower computes so many blocks as a limit of tokens allows, and without steps it never waits.
"""

import threading

PATIENCE_S = 0.5
"""After this time the tower goes on: a step may take longer, when kernels compile or a graph is captured."""


class Pace:
    """`stepped` and `free` belong to the step loop, `take` to the thread of the tower."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: float | None = None  # tokens until the next step; None: no step runs

    def stepped(self, num_tokens: int) -> None:
        """Let the tower compute all blocks of `num_tokens` tokens beside the step that was launched now."""
        with self._changed:
            self._left = float(num_tokens)
            self._changed.notify_all()

    def free(self) -> None:
        """Let the tower go on without waiting: the group sleeps, or the tower is to end."""
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def take(self, num_tokens: float) -> None:
        """Wait until work of this size may begin. The last piece beside a step may exceed what is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._left is None or self._left > 0, PATIENCE_S)
            if self._left is not None:
                self._left -= num_tokens
