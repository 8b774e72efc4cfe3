"""Running an experiment with a fake engine: records, crashes, resume, locks, full disks, reports."""

import csv
import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.experiments import drawing, report, results_folder
from cluster.experiments.results_folder import FolderError, ResultsFolder, cluster_lock, locked
from cluster.experiments.target import EngineError, Job
from tests.unit.experiment_case import FakeEngines, make_base, run_with, write

SWEEP = {"grid": {"cluster.ranks": [1, 2], "workload.input_len": [4, 8]}}
WORKLOAD = {"requests": 4, "output_len": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("experiments"))


@pytest.fixture
def file(folder: Path) -> Path:
    report = {"baseline": {"cluster.ranks": 1}}
    return write(folder, sweep=SWEEP, workload=WORKLOAD, repeats=2, warmup=1, report=report)


def test_an_engine_serves_all_cells_of_its_configuration(file: Path, tmp_path: Path) -> None:
    engines = FakeEngines()
    assert run_with(engines, file, tmp_path / "out") == 0
    assert [config.cluster.ranks for config in engines.starts] == [1, 2]
    assert engines.num_open == 0
    salts = [job.salt for job in engines.jobs]
    assert salts[:3] == ["warm-up", "001-r1", "001-r2"] and salts.count("warm-up") == 4
    warm_up, first, second = (job.load for job in engines.jobs[:3])
    assert warm_up and first and second
    assert len(warm_up.requests) == 1 and len(first.requests) == 4
    assert first.digest() != second.digest(), "a repeat has prompts of its own"
    assert engines.jobs[7].load == first.__class__(first.requests, None, 8), "equal for all cells"


def test_each_run_is_recorded(file: Path, tmp_path: Path) -> None:
    run_with(FakeEngines(), file, tmp_path)
    lines = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert lines[0]["settings"] == {"cluster.ranks": 1, "workload.input_len": 4}
    assert lines[0]["metrics"]["output_tokens_per_s"] == pytest.approx(4 * 5 / 0.005, rel=0.01)
    assert lines[0]["metrics"]["steps"] == 3
    assert lines[0]["config_hash"] != lines[-1]["config_hash"]
    kept = json.loads((tmp_path / "runs" / "001-r1" / "run.json").read_text())
    assert kept == lines[0]
    assert "ranks: 1" in (tmp_path / "runs" / "001-r1" / "config.yaml").read_text()
    assert (tmp_path / "runs" / "001-r2" / "log").read_text() == "001-r2\n", "its own part alone"


def test_a_crash_is_recorded_and_the_others_go_on(file: Path, tmp_path: Path) -> None:
    def crash(job: Job) -> None:
        if job.salt == "002-r1":
            raise EngineError("rank 1 ended with exit code -9")

    engines = FakeEngines(crash)
    assert run_with(engines, file, tmp_path) == 1
    assert len(engines.starts) == 3, "a new engine after the crash"
    failed = [line for line in ResultsFolder(tmp_path).lines() if line["error"]]
    assert [line["error"] for line in failed] == ["rank 1 ended with exit code -9"]
    again = FakeEngines()
    assert run_with(again, file, tmp_path) == 0
    assert [job.salt for job in again.jobs] == ["warm-up", "002-r1"], "only the failed run again"
    assert len(ResultsFolder(tmp_path).done()) == 8


def test_an_engine_that_does_not_start_fails_its_cells_alone(file: Path, tmp_path: Path) -> None:
    engines = FakeEngines()
    start = engines.start

    def refuse(config, folder, start_s):  # type: ignore[no-untyped-def]
        if config.cluster.ranks == 2:
            raise RuntimeError("no memory")
        return start(config, folder, start_s)

    engines.start = refuse  # type: ignore[method-assign]
    assert run_with(engines, file, tmp_path) == 4
    errors = {line["error"] for line in ResultsFolder(tmp_path).lines() if line["cell"] > 2}
    assert errors == {"RuntimeError: no memory"}


def test_ctrl_c_keeps_what_has_ended_and_the_next_call_continues(
    file: Path, tmp_path: Path
) -> None:
    def interrupt(job: Job) -> None:
        if job.salt == "001-r2":
            raise KeyboardInterrupt

    engines = FakeEngines(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_with(engines, file, tmp_path)
    assert engines.num_open == 0
    assert ResultsFolder(tmp_path).done() == {(1, 1)}
    with (tmp_path / "results.jsonl").open("a") as results:
        results.write('{"cell": 1, "rep')  # as a kill leaves it
    again = FakeEngines()
    assert run_with(again, file, tmp_path) == 0
    assert len(ResultsFolder(tmp_path).done()) == 8
    assert "001-r1" not in {job.salt for job in again.jobs}


def test_more_repeats_continue_a_folder_and_other_cells_do_not(file: Path, tmp_path: Path) -> None:
    run_with(FakeEngines(), file, tmp_path)
    more = FakeEngines()
    run_with(more, file, tmp_path, "repeats=3")
    salts = [job.salt for job in more.jobs if job.salt != "warm-up"]
    assert salts == ["001-r3", "002-r3", "003-r3", "004-r3"]
    with pytest.raises(FolderError, match="results of another experiment"):
        run_with(FakeEngines(), file, tmp_path, "workload.requests=5")
    assert len(ResultsFolder(tmp_path).done()) == 12


def test_a_folder_of_something_else_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FolderError, match=r"thesis\.tex"):
        run_with(FakeEngines(), file, tmp_path)


def test_one_writer_for_a_folder_and_one_experiment_for_a_machine(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        locked(tmp_path / "out" / ".lock", "the folder out"),
        pytest.raises(FolderError, match=f"in use by another experiment, process {os.getpid()}"),
    ):
        run_with(FakeEngines(), file, tmp_path / "out")
    monkeypatch.setattr(results_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    with cluster_lock(None):
        with cluster_lock("10.0.0.1:6379"):
            pass
        with pytest.raises(FolderError, match="this machine is in use"), cluster_lock(None):
            pass


def test_a_full_disk_ends_the_run_and_leaves_no_part_of_a_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def full(fd: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results_folder.os, "fsync", full)
    engines = FakeEngines()
    with pytest.raises(FolderError, match=r"the disk is full\. Ended runs are kept"):
        run_with(engines, file, tmp_path)
    assert engines.num_open == 0
    assert (tmp_path / "results.jsonl").read_text().count("\n") == 2
    assert len(ResultsFolder(tmp_path).done()) == 2
    assert run_with(FakeEngines(), file, tmp_path) == 0


def test_limits_end_the_experiment(file: Path, tmp_path: Path) -> None:
    engines = FakeEngines()
    assert run_with(engines, file, tmp_path, "limits.total_s=0.0000001") == 0
    assert engines.jobs == []


def test_tables(file: Path, tmp_path: Path) -> None:
    run_with(FakeEngines(), file, tmp_path)
    report.write_report(tmp_path, plotted=False)
    page = (tmp_path / "summary.md").read_text()
    assert "8 of 8 runs" in page
    assert "| 2 | 8 | 8,000 |" in page
    assert "Ratio to the cell with ranks=1" in page
    assert "| ranks=2, input_len=4 | 2.000 |" in page
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == 8 and rows[0]["cluster.ranks"] == "1"
    assert float(rows[-1]["ttft_ms.p50"]) == pytest.approx(0.5)


def test_folders_are_compared(file: Path, tmp_path: Path) -> None:
    for name in ("before", "after"):
        run_with(FakeEngines(), file, tmp_path / name)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "before"), str(tmp_path / "after")])
    assert result.exit_code == 0, result.output
    assert "after / before" in result.output and "| 1.000 |" in result.output
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "has no results of an experiment" in result.output


@pytest.mark.parametrize(
    ("sweep", "x"),
    [
        (SWEEP, "cluster.ranks"),
        ({"grid": {"overlap.mode": ["on", "off"]}}, None),
        (
            {"grid": {"overlap.mode": ["on", "off"], "workload.input_len": [4, 8]}},
            "workload.input_len",
        ),
        ({}, None),
    ],
)
def test_the_axes_choose_the_plot(folder: Path, tmp_path: Path, sweep: dict, x: str | None) -> None:
    run_with(FakeEngines(), write(folder, sweep=sweep, workload=WORKLOAD), tmp_path)
    results = report.read_results(tmp_path)
    assert drawing.choose_x(results) == x
    assert drawing.draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
