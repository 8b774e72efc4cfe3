"""How much of this machine other processes use. Linux only; elsewhere nothing is known."""

import time
from pathlib import Path

STAT = Path("/proc/stat")
SAMPLE_S = 0.2
IDLE = (3, 4)  # fields of the first line of /proc/stat after its name: idle, waiting for the disk


def busy_share() -> float | None:
    """Return the share of all cores' time in which they worked during SAMPLE_S; None if it is not known."""
    before = _ticks()
    time.sleep(SAMPLE_S)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """Return the clock ticks of all cores since the boot: of work, and all."""
    try:
        _, *fields = STAT.read_text().splitlines()[0].split()
        ticks = [int(field) for field in fields[:8]]
        return sum(ticks) - sum(ticks[index] for index in IDLE), sum(ticks)
    except (OSError, ValueError, IndexError):
        return None
