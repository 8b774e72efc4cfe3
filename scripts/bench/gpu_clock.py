"""A GPU's clock and power while something runs on it: under the limit on power the one falls as the other rises."""

import statistics
import threading
from types import TracebackType

import torch

EVERY_S = 0.02


class GpuClock:
    """Asks NVML, from a thread, while it is entered; where there is no NVML it finds nothing."""

    def __init__(self, device: torch.device):
        self._device, self._over = device, threading.Event()
        self._samples: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "GpuClock":
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def medians(self) -> dict[str, float] | None:
        """MHz of the SMs and watts; the first third is left out, for NVML tells the mean of up to a second."""
        samples = self._samples[len(self._samples) // 3 :]
        if not samples:
            return None
        clocks, powers = zip(*samples, strict=True)
        return {"mhz": statistics.median(clocks), "watts": round(statistics.median(powers) / 1e3)}

    def _sample(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                found = torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)
            except (ImportError, RuntimeError):
                return
            self._samples.append(found)
