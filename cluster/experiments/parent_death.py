"""Ends a process with the process that started it, so that a killed experiment leaves no engine behind. Linux only."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of prctl(2)


def stop_with_parent(parent: int, number: signal.Signals) -> None:
    """Get signal `number` when process `parent`, which started this process, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(f"process {parent} has ended")
