"""The share of the cores that other processes use."""

from pathlib import Path

import pytest

from cluster.experiments import machine_load
from cluster.experiments.machine_load import busy_share


def test_work_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine_load, "STAT", stat)
    later = "cpu 40 0 10 140 40 0 0 10 0 0\n"  # 40 of 100 ticks
    monkeypatch.setattr(machine_load.time, "sleep", lambda seconds: stat.write_text(later))
    assert busy_share() is None  # there is nothing before it
    stat.write_text("cpu 10 0 10 100 20 0 0 0 0 0\n")
    assert busy_share() == pytest.approx(0.4)
