"""A GPU's clock and power while something runs on it: under the limit on power the one falls as the other rises."""

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

EVERY_S = 0.02
Sample = tuple[int, int]  # MHz of the SMs, milliwatts


@contextmanager
def clock_samples(device: torch.device) -> Iterator[list[Sample]]:
    """What NVML answers a thread that asks meanwhile; it stays empty where there is no NVML, or no GPU."""
    samples: list[Sample] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(EVERY_S):
            try:
                samples.append((torch.cuda.clock_rate(device), torch.cuda.power_draw(device)))
            except (ImportError, RuntimeError):
                return

    if device.type != "cuda":
        over.set()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def medians(samples: Sequence[Sample]) -> dict[str, float] | None:
    """MHz and watts; the first third is left out, for NVML tells the mean of up to a second."""
    samples = samples[len(samples) // 3 :]
    if not samples:
        return None
    clocks, powers = zip(*samples, strict=True)
    return {"mhz": statistics.median(clocks), "watts": round(statistics.median(powers) / 1e3)}
