"""Joules that GPUs have used, by the counters of NVML, the driver's library. Needs no package and no CUDA context."""

import os
from collections.abc import Sequence
from ctypes import CDLL, byref, c_ulonglong, c_void_p


class GpuEnergy:
    """The counters of some GPUs, by their numbers among the visible ones. Without NVML there are none."""

    def __init__(self, numbers: Sequence[int], library: str = "libnvidia-ml.so.1"):
        self._handles: list[c_void_p] = []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        known = visible.split(",") if visible else []
        try:
            self._nvml = CDLL(library)
            self._call("nvmlInit_v2")
            for number in numbers:
                index = int(known[number]) if known else number
                handle = c_void_p()
                self._call("nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
                self._handles.append(handle)
        except (OSError, ValueError, IndexError):
            self._handles = []

    def joules(self) -> float | None:
        """Return the joules of all of them since the driver was loaded; None without counters."""
        total = 0.0
        for handle in self._handles:
            millijoules = c_ulonglong()
            try:
                self._call("nvmlDeviceGetTotalEnergyConsumption", handle, byref(millijoules))
            except OSError:
                return None
            total += millijoules.value / 1e3
        return total if self._handles else None

    def _call(self, name: str, *args: object) -> None:
        error = getattr(self._nvml, name)(*args)
        if error:
            raise OSError(f"{name} returned {error}")


def used(before: float | None, after: float | None) -> float | None:
    """Return the joules in between."""
    return None if before is None or after is None else round(after - before, 3)
