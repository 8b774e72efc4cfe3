"""The command `phalanx batch`: options, exit codes, and messages, over a scripted engine."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.api.settings import ApiSettings
from cluster.cli import app
from cluster.commands.start import ServerError
from cluster.commands.stop_signals import StopSignals
from cluster.config.phalanx_config import PhalanxConfig
from cluster.errors import EngineDeadError
from cluster.offline import engine
from cluster.offline.dispatcher import Dispatcher
from tests.unit.api_fakes import FakeBackend, tiny_checkpoint, tiny_tokenizer
from tests.unit.test_batch import request, results, write


class FakeEngine:
    """`OfflineEngine` over a scripted backend; `failure` is raised at its start."""

    failure: Exception | None = None
    client = FakeBackend("hello")
    concurrency = 4
    closed = 0

    def __init__(self, config: PhalanxConfig, console: Any, stop: StopSignals) -> None:
        if FakeEngine.failure is not None:
            raise FakeEngine.failure
        self.client = FakeEngine.client
        self.dispatcher = Dispatcher(self.client, tiny_tokenizer(), ApiSettings())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def close(self) -> None:
        FakeEngine.closed += 1


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command in a folder with a configuration; returns its exit code and what it printed."""
    tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "config.yaml").write_text("model: {path: tiny}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "OfflineEngine", FakeEngine)
    monkeypatch.setattr(StopSignals, "install", lambda self: None)
    for name, value in (("failure", None), ("client", FakeBackend("hello")), ("closed", 0)):
        monkeypatch.setattr(FakeEngine, name, value)

    def run(*options: str) -> tuple[int, str]:
        files = ("--input", "in.jsonl", "--output", "out.jsonl")
        result = CliRunner().invoke(app, ["batch", *options, *files])
        return result.exit_code, " ".join(result.output.split())

    return run


def test_a_batch_with_an_answer_for_each_line(batch) -> None:
    write(Path("in.jsonl"), request("a"), request("b"))
    code, shown = batch("config.yaml")
    assert code == 0 and "2 of 2 lines have a result, 0 with an error" in shown, shown
    assert "see out.jsonl" in shown and FakeEngine.closed == 1
    assert batch("config.yaml")[0] == 0 and FakeEngine.closed == 1  # starts no ranks for nothing
    assert len(results(Path("out.jsonl"))) == 2


def test_errors_of_lines_are_an_exit_code_of_their_own(batch) -> None:
    write(Path("in.jsonl"), request("a"), "{", request("b", "/v1/nothing"))
    code, shown = batch("config.yaml")
    assert code == 3 and "3 of 3 lines have a result, 2 with an error" in shown
    assert batch("config.yaml")[0] == 3


def test_files_that_do_not_fit(batch) -> None:
    code, shown = batch("config.yaml")
    assert code == 2 and "error: cannot read in.jsonl: no such file" in shown
    assert not Path("out.jsonl").exists()
    write(Path("in.jsonl"), request("a"))
    Path("out.jsonl").write_text("notes\n")
    code, shown = batch("config.yaml")
    assert code == 2 and "choose another --output" in shown and FakeEngine.closed == 0


def test_without_a_yaml_the_demo_answers(batch) -> None:
    write(Path("in.jsonl"), request("a"))
    code, shown = batch()
    assert code == 0 and "1 of 1 lines have a result" in shown


def test_wrong_options(batch) -> None:
    write(Path("in.jsonl"), request("a"))
    code, shown = batch("config.yaml", "--set", "cluster.ranks=0")
    assert code == 2 and "cluster.ranks" in shown
    assert batch("config.yaml", "--concurrency", "0")[0] == 2


def test_the_end_of_the_ranks(batch) -> None:
    write(Path("in.jsonl"), request("a"))
    FakeEngine.client.fail_before = EngineDeadError("rank 1: its process died")
    FakeEngine.client.ready = (False, "rank 1: its process died")
    code, shown = batch("config.yaml")
    assert code == 1 and FakeEngine.closed == 1
    assert "error: rank 1: its process died" in shown and "the same command resumes" in shown
    FakeEngine.failure = ServerError("start failed at stage 'weights'")
    code, shown = batch("config.yaml")
    assert code == 1 and "error: start failed at stage 'weights'" in shown


def test_a_signal(batch, monkeypatch) -> None:
    write(Path("in.jsonl"), *(request(str(i)) for i in range(9)))
    FakeEngine.client.hang_after = 2
    monkeypatch.setattr(StopSignals, "is_set", lambda self: bool(FakeEngine.client.open))
    code, shown = batch("config.yaml", "--concurrency", "2")
    assert code == 130 and "stopped: 0 of 9 lines" in shown and "the same command resumes" in shown
    assert len(FakeEngine.client.aborted) == 2 and FakeEngine.closed == 1
    FakeEngine.failure = engine.StoppedError()
    assert batch("config.yaml")[0] == 130
