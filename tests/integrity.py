"""After every committed step, a scheduler of a test compares its KV cache with its running sequences."""

from functools import wraps
from typing import Any

from workers.scheduler.scheduler import Scheduler


def check_every_step() -> None:
    """Do so in this process from now on."""
    commit = Scheduler.commit
    if hasattr(commit, "__wrapped__"):
        return

    @wraps(commit)
    def checked(self: Scheduler, *args: Any) -> Any:
        outputs = commit(self, *args)
        self.check_integrity()
        return outputs

    Scheduler.commit = checked  # type: ignore[method-assign]
