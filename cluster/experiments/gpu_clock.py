"""Clock and power of a GPU during a run. At the limit of power the clock falls, and kernels take longer."""

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kernels.host.owned import start_thread

EVERY_S = 0.1
Sample = tuple[int, int]  # MHz of the SMs, milliwatts


@contextmanager
def clock_samples(device: torch.device) -> Iterator[list[Sample]]:
    """Yield the samples that a thread reads from NVML meanwhile; none without NVML or without a GPU."""
    samples: list[Sample] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(EVERY_S):
            try:
                samples.append((torch.cuda.clock_rate(device), torch.cuda.power_draw(device)))
            except (ImportError, RuntimeError):
                return

    if device.type != "cuda":
        yield samples
        return
    failures: list[BaseException] = []
    thread = start_thread(sample, failures.append, "clock-samples")
    try:
        yield samples
    finally:
        over.set()
        thread.join()
    for failure in failures:
        raise failure


def clock_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the medians, without the first third: NVML returns the mean of up to a second."""
    samples = samples[len(samples) // 3 :]
    if not samples:
        return {}
    clocks, powers = zip(*samples, strict=True)
    return {"gpu_mhz": statistics.median(clocks), "gpu_watts": statistics.median(powers) / 1e3}
