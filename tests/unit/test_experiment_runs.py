"""Running an experiment with a fake engine: records, crashes, resume, locks, full disks, reports."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments import cluster_lock, drawing, report, results_folder, runner
from cluster.experiments.cluster_lock import experiment_lock
from cluster.experiments.command import signals_as_ctrl_c
from cluster.experiments.comparison import Results
from cluster.experiments.experiment import load_experiment
from cluster.experiments.parent_death import stop_with_parent
from cluster.experiments.results_folder import FolderError, ResultsFolder, locked
from cluster.experiments.target import EngineError, Job
from tests.unit.experiment_case import FakeEngines, head_of, make_base, run_with, write

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


@pytest.mark.parametrize("refused", [0, 1])
def test_an_engine_changes_its_settings_or_is_started_anew(
    folder: Path, tmp_path: Path, refused: int
) -> None:
    grid = {"overlap.mode": ["on", "off"], "workload.input_len": [4, 8]}
    file = write(folder, sweep={"grid": grid}, workload=WORKLOAD, order="paired", warmup=1)
    engines = FakeEngines(refused_changes=refused)
    assert run_with(engines, file, tmp_path, "repeats=2") == 0
    assert [config.overlap.mode for config in engines.changes] == ["off", "on", "off"]
    assert len(engines.starts) == 1 + refused and engines.num_open == 0
    counts = [line["engine"]["num_changes"] for line in ResultsFolder(tmp_path).lines()]
    assert counts == ([0, 2, 0, 2, 1, 3, 1, 3] if not refused else [0, 1, 0, 1, 0, 2, 0, 2])
    warm_ups = [job for job in engines.jobs if job.salt == "warm-up"]
    assert len(warm_ups) == 8, "a changed engine is warmed up again"


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
    assert (kept["commit"], kept["versions"], kept["seed"]) == ("abc", {"torch": "2"}, 0)
    assert kept["hardware"]["cpu"] == "test" and kept["date"] > "2026-01-01"
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
    monkeypatch.setattr(cluster_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    local = PhalanxConfig(model={"path": "nowhere"})
    joined = PhalanxConfig(model={"path": "nowhere"}, cluster={"ray_address": "10.0.0.1:6379"})
    with experiment_lock(local), experiment_lock(joined):
        for config, what in ((local, "this machine"), (joined, "the Ray cluster 10.0.0.1:6379")):
            with pytest.raises(FolderError, match=f"{what} is in use"), experiment_lock(config):
                pass
    with experiment_lock(joined):  # the next one can begin
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "experiment.json lacks identity, title"),
        ("[1]", "experiment.json lacks identity"),
        ("{", "has no results of an experiment"),
    ],
)
def test_a_folder_of_another_program_is_refused(
    file: Path, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(FolderError, match=expected):
        run_with(FakeEngines(), file, tmp_path)


def test_a_line_that_is_no_result_is_named(file: Path, tmp_path: Path) -> None:
    run_with(FakeEngines(), file, tmp_path)
    with (tmp_path / "results.jsonl").open("a") as results:
        results.write("{}\n")
    with pytest.raises(FolderError, match=r"results\.jsonl, line 9 is no result of a run"):
        run_with(FakeEngines(), file, tmp_path)


def test_results_of_another_experiment_are_refused_in_a_dry_run(
    file: Path, folder: Path, tmp_path: Path
) -> None:
    run_with(FakeEngines(), file, tmp_path)
    other = write(folder, sweep=SWEEP, workload={"requests": 5})
    command = ["experiment", str(other), "--output", str(tmp_path), "--dry-run"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "results of another experiment" in result.output
    assert "runs have results" not in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_as_ctrl_c_does(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP for all that it starts
    try:
        with pytest.raises(KeyboardInterrupt, match=number.name), signals_as_ctrl_c():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_nohup_keeps_an_experiment_running() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_experiment_leaves_no_server(tmp_path: Path) -> None:
    child = (
        "import os, signal, sys, time; from cluster.experiments.parent_death import stop_with_parent\n"
        "stop_with_parent(int(sys.argv[1]), signal.SIGINT); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-c', sys.argv[1], str(os.getpid())]\n"
        "subprocess.Popen(command, start_new_session=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", parent, child]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert int(process.stdout.readline()) != process.pid
    process.kill()
    process.communicate(timeout=120)  # until the server has closed the pipes too


def test_a_server_without_its_experiment_does_not_start() -> None:
    with pytest.raises(SystemExit, match="process 1 has ended"):
        stop_with_parent(1, signal.SIGINT)


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


def test_the_page_names_every_origin_and_failed_requests(file: Path, tmp_path: Path) -> None:
    run_with(FakeEngines(), file, tmp_path, "repeats=1")
    lines = ResultsFolder(tmp_path).lines()
    lines[0]["commit"] = "def+"
    lines[1]["request_errors"] = {"HTTP 429: overloaded": 3}
    page = report.summary(Results.of(head_of(load_experiment(file)), lines))
    assert "The runs have different origins" in page
    assert "commit def with changes that are not committed; " in page and " 1 runs." in page
    assert "commit abc; " in page and " 3 runs." in page
    assert f"- {lines[1]['name']}, repeat 1: 3 x HTTP 429: overloaded" in page


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_plot(folder: Path, tmp_path: Path) -> None:
    cells = [
        {"workload.prompts": str(folder / f"{'a-long-name' * 12}-{number}.jsonl")}
        for number in range(30)
    ]
    for cell in cells:
        Path(cell["workload.prompts"]).write_text('{"prompt": "a"}')
    keys = {"sweep": {"list": cells}, "repeats": 1, "warmup": 0}
    run_with(FakeEngines(), write(folder, workload=WORKLOAD, **keys), tmp_path)
    results = report.read_results(tmp_path)
    assert drawing.draw(results, tmp_path / "plot.png")
    name = drawing.series_name(results, results.cells[6], results.axes)
    assert name.endswith("... (cell 7)") and len(name) < 60


def test_numbers_that_go_with_another_axis_name_no_line(folder: Path, tmp_path: Path) -> None:
    paired = {
        "workload.phase": ["prefill", "prefill", "decode"],
        "workload.input_len": [4, 8, 6],
        "workload.requests": [3, 2, 2],
        "workload.concurrency": [2, 1, None],
    }
    sweep = {"grid": {"cluster.ranks": [1, 2]}, "paired": [paired]}
    path = write(folder, sweep=sweep, workload={"output_len": 2}, repeats=1)
    assert run_with(FakeEngines(), path, tmp_path) == 0
    results = report.read_results(tmp_path)
    by_length = drawing.naming_axes(results, "workload.input_len")
    assert by_length == ["cluster.ranks", "workload.phase"]
    by_ranks = drawing.naming_axes(results, "cluster.ranks")
    assert by_ranks == ["workload.phase", "workload.input_len"], "a phase has two lengths"


def test_the_page_names_a_busy_machine(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.05, 0.9, 0.1, 0.15])
    monkeypatch.setattr(runner, "busy_share", lambda: next(shares))
    run_with(FakeEngines(), file, tmp_path / "busy", "repeats=1")
    assert [
        line["engine"]["busy_before_start"] for line in ResultsFolder(tmp_path / "busy").lines()
    ] == [*(0.05, 0.05, 0.9, 0.9)]
    page = report.summary(report.read_results(tmp_path / "busy"))
    assert "Other processes used 48 % of this machine's cores" in page and "at most 90 %" in page
    run_with(FakeEngines(), file, tmp_path / "idle", "repeats=1")
    assert "Other processes" not in report.summary(report.read_results(tmp_path / "idle"))


def test_requests_that_fail_are_counted(file: Path, tmp_path: Path) -> None:
    engines = FakeEngines(failed_requests=2)
    assert run_with(engines, file, tmp_path, "repeats=1") == 0
    assert {str(line["request_errors"]) for line in ResultsFolder(tmp_path).lines()} == {
        "{'out of luck': 2}"
    }


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
    keys = {"sweep": sweep} if sweep else {}
    run_with(FakeEngines(), write(folder, workload=WORKLOAD, **keys), tmp_path)
    results = report.read_results(tmp_path)
    assert drawing.choose_x(results) == x
    assert drawing.draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
