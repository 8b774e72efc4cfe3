"""Joules of GPUs, from a stand-in for NVML, and where reports show them."""

from collections.abc import Callable
from ctypes import c_ulonglong
from typing import Any

import pytest

from scripts.bench import gpu_energy, gpu_serving_report, timeline_report
from scripts.bench.gpu_energy import GpuEnergy, used


class Nvml:
    """Four GPUs; GPU n has used n + 1 joules, and one more at each look."""

    def __init__(self, error_of: str = ""):
        self.error_of, self.asked, self.looks = error_of, [], 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name == "nvmlDeviceGetHandleByIndex_v2":
                self.asked.append(args[0])
                args[1]._obj.value = args[0] + 1
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                assert isinstance(args[1]._obj, c_ulonglong)
                args[1]._obj.value = 1000 * (args[0].value + self.looks)
                self.looks += 1
            return 9 if name == self.error_of else 0

        return call


@pytest.mark.parametrize(("visible", "asked"), [(None, [0, 1]), ("3,2", [3, 2])])
def test_joules_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: list[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml()
    monkeypatch.setattr(gpu_energy, "CDLL", lambda name: nvml)
    counters = GpuEnergy([0, 1])
    assert nvml.asked == asked
    before, after = counters.joules(), counters.joules()
    assert before == sum(asked) + 3
    assert used(before, after) == 4


@pytest.mark.parametrize("error_of", ["nvmlInit_v2", "nvmlDeviceGetTotalEnergyConsumption"])
def test_nothing_without_counters(monkeypatch: pytest.MonkeyPatch, error_of: str) -> None:
    nvml = Nvml(error_of)
    monkeypatch.setattr(gpu_energy, "CDLL", lambda name: nvml)
    assert GpuEnergy([0]).joules() is None
    monkeypatch.undo()
    assert GpuEnergy([0], "libno-such-library.so").joules() is None
    assert used(None, 3.0) is None


def test_reports_show_joules_where_they_were_counted() -> None:
    load = {"in_flight": 8, "input_len": 60, "output_len": 4, "requests": 16}
    counted = load | {"joules": 512.0}
    assert "| 8 / 60 / 4 | 512 | 500.0 |" in gpu_serving_report.energy_table([load, counted])
    assert gpu_serving_report.energy_table([load, load | {"joules": None}]) == []
    ranks = [{"joules_a_step": 40.0}, {"joules_a_step": 60.0}]
    (line,) = timeline_report._energy(ranks, 1000)
    assert "50.0 J a step and GPU, 50.00 mJ a token" in line
    assert timeline_report._energy([{}, {}], 1000) == []
