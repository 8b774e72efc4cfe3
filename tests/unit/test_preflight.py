"""What runs beside a start: its warnings are told once, its errors come first, and it ends with the server."""

import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from rich.console import Console

from cluster.commands import preflight, start
from cluster.commands.check import check
from cluster.commands.preflight import Preflight
from cluster.commands.start import RankStart, ServerError
from cluster.commands.stop_signals import StopSignals
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from kernels.attention.flashinfer import FlashInferAttention
from kernels.backends.select import BackendChoiceError
from kernels.grouped_gemm.deepgemm import DeepGemm
from kernels.interface.registry import ATTENTION, backend_class
from workers.models.registry import load_model_config

CONFIGS = Path(__file__).parents[2] / "configs"
# Keeps what it is asked, answers what it finds, and then compiles for ever in a process of its own.
PROCESS = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
pathlib.Path("question").write_bytes(sys.stdin.buffer.read())
os.write(1, pathlib.Path("answer").read_bytes())
os.close(1)
compiler = subprocess.Popen(["sleep", "1000"])
pathlib.Path("compiler").write_text(f"{{compiler.pid}}\\n")
compiler.wait()
"""


def _config(*settings: str) -> PhalanxConfig:
    return load_config(CONFIGS / "local.yaml", list(settings))


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Start a process that answers so."""
    program = tmp_path / "python"
    program.write_text(PROCESS)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight.sys, "executable", str(program))
    started: list[Preflight] = []

    def start(answer: bytes) -> Preflight:
        (tmp_path / "answer").write_bytes(answer)
        started.append(Preflight(_config(), 3))
        return started[-1]

    yield start
    for process in started:
        process.close()


def _soon(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # it ends before the file is opened, or before the file is read
        return False


def _start(process: Preflight) -> RankStart:
    return RankStart(_config(), StopSignals(), process, Console(highlight=False))


def test_warnings_are_told_once(answer, capsys, tmp_path) -> None:
    process = answer(pickle.dumps(["few cores", "no keys"]))
    start = _start(process)
    start.print_warnings()
    start.print_warnings()
    assert process.done()
    assert capsys.readouterr().out == "  warning: few cores\n  warning: no keys\n"
    assert pickle.loads((tmp_path / "question").read_bytes()) == (_config(), 3)


def test_a_failed_start_is_told_by_the_check_if_it_knows_better(answer) -> None:
    unfit = BackendChoiceError("attention", "flashinfer", "no GPU", ["sdpa"])
    with (
        pytest.raises(BackendChoiceError, match=r"kernels\.attention"),
        _start(answer(pickle.dumps(unfit))).explained(),
    ):
        raise ServerError("start failed at stage 'group'")
    with (
        pytest.raises(ServerError, match="stage 'group'"),
        _start(answer(pickle.dumps([]))).explained(),
    ):
        raise ServerError("start failed at stage 'group'")


def test_its_compilers_end_with_it(answer, tmp_path) -> None:
    process, told = answer(pickle.dumps([])), tmp_path / "compiler"
    _soon(lambda: told.exists() and told.read_text().endswith("\n"), "no compiler")
    compiler = int(told.read_text())
    assert process.warnings() == [] and _runs(compiler)
    process.close()
    _soon(lambda: not _runs(compiler), f"process {compiler} still runs")


def test_an_end_without_an_answer_is_a_warning(answer, monkeypatch) -> None:
    monkeypatch.setattr(preflight.sys, "executable", "/bin/false")
    (warning,) = answer(b"").warnings()
    assert "exit code 1" in warning and "phalanx check" in warning


def test_an_answer_that_nobody_understands_is_a_warning_too(answer, tmp_path) -> None:
    process = answer(b"noise")
    _soon((tmp_path / "compiler").exists, "no compiler")
    process.close()
    (warning,) = process.warnings()
    assert "exit code -15" in warning


def test_the_process_itself() -> None:
    """On a machine without a GPU it compiles nothing."""
    config = _config("serve.host=0.0.0.0")
    process = Preflight(config, 0)
    assert process.warnings() == check(config, 0).warnings != []
    assert process._process.wait(120) == 0
    process.close()


def test_the_process_raises_what_the_check_raises() -> None:
    process = Preflight(_config("cluster.device=cpu", "kernels.attention=flashinfer"), 0)
    with pytest.raises(BackendChoiceError, match="flashinfer"):
        process.warnings()
    process.close()


def test_a_broken_check_says_how(monkeypatch, capfd) -> None:
    def broken(*args: object) -> None:
        raise KeyError("mended soon")

    monkeypatch.setattr("cluster.commands.check.check", broken)
    report, outcome = preflight._check(_config(), 0)
    assert report is None and isinstance(outcome, RuntimeError)
    assert str(outcome) == "KeyError: 'mended soon'"
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("gpu", [True, False])
def test_the_chosen_backends_compile_their_kernels(gpu, monkeypatch) -> None:
    attention: list[tuple[object, int]] = []
    products: list[Any] = []
    monkeypatch.setattr(
        FlashInferAttention,
        "compile_kernels",
        lambda dtype, specs: attention.append((dtype, len(specs))),
    )
    monkeypatch.setattr(DeepGemm, "compile_kernels", lambda *found: products.append(found))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(preflight.os, "dup2", lambda *_: None)
    names = {"attention": {"name": "flashinfer"}, "grouped_gemm": {"name": "deepgemm"}}
    config = _config("model.dtype=bfloat16", "scheduler.max_num_batched_tokens=512")
    preflight._compile(config, SimpleNamespace(backends=names))
    model = load_model_config(config.model.path)
    assert attention == ([(torch.bfloat16, len(model.layers))] if gpu else [])
    assert len(products) == gpu
    for shape, dense, sizes in products:
        assert (shape.num_experts, shape.max_num_tokens) == (model.num_experts, 512)
        assert not dense and {512, 384, 256, 128, 1} <= set(sizes)


def test_backends_declare_whether_prompts_are_captured() -> None:
    found = {
        name: [backend_class("attention", name).captures_prompts(hopper=it) for it in (True, False)]
        for name in ATTENTION
    }
    assert found.pop("flashinfer") == [True, False]
    assert found.pop("triton") == [True, True]
    assert set(map(tuple, found.values())) == {(False, False)}


def test_a_lost_process_of_ray_ends_the_server(monkeypatch: pytest.MonkeyPatch):
    """Calls of Ray would wait, so the launcher makes none and ends Ray's other processes itself."""
    ended = []
    dead = [("log_monitor", None), ("raylet", None)]
    node = SimpleNamespace(dead_processes=lambda: dead)
    monkeypatch.setattr("ray._private.worker._global_node", node)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr(start.reaper, "end_session", lambda: ended.append("session"))
    subject = _start(SimpleNamespace(done=lambda: True))
    subject._owns_ray = True
    with pytest.raises(ServerError, match="Ray's process raylet has ended"):
        subject.check()
    subject.shut_down(lambda: ended.append("beside"))
    assert ended == ["session", "ray"]
    dead.pop()
    assert start.lost_ray_process() is None


def test_a_supervisor_that_an_ingress_creates_during_the_end_is_ended_too(
    monkeypatch: pytest.MonkeyPatch,
):
    """In a joined cluster it blocked the next server of this name with other settings for minutes."""
    ended, named = [], ["own"]  # the supervisor that Ray has under the name
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr(start, "lost_ray_process", lambda: None)
    monkeypatch.setattr("cluster.supervisor.actor.find", lambda config: named[0])

    def stop(successor: str | None) -> list[str]:
        subject = _start(SimpleNamespace(done=lambda: True))
        monkeypatch.setattr(subject, "_stop_ranks", ended.append)
        subject.supervisor, subject._owns_ray = "own", True
        subject.shut_down(lambda: ended.append("application") or named.__setitem__(0, successor))
        found = ended[:]
        ended.clear()
        return found

    assert stop("created meanwhile") == ["own", "application", "created meanwhile", "ray"]
    # Ray may have the killed one under the name for a moment; a call of it would be an error on the console.
    assert stop("own") == stop(None) == ["own", "application", "ray"]


@pytest.mark.parametrize("error", [GetTimeoutError("5 s"), RayError("Ray's GCS does not answer")])
def test_a_supervisor_that_does_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, error: RayError
):
    """In a joined cluster it blocked the next server of this name for a minute."""
    killed: list[Any] = []

    def get(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("ray.kill", killed.append)
    supervisor = SimpleNamespace(stop=SimpleNamespace(remote=lambda: None))
    _start(SimpleNamespace(done=lambda: True))._stop_ranks(supervisor)
    assert killed == [supervisor]


def test_a_supervisor_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch):
    """After Ctrl-Z for longer than its lease, the command ended with a traceback of Ray."""

    def get(*_: Any, **__: Any) -> None:
        raise ActorDiedError

    monkeypatch.setattr(start, "lost_ray_process", lambda: None)
    monkeypatch.setattr("ray.wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr("ray.get", get)
    subject = _start(SimpleNamespace(done=lambda: True))
    subject.supervisor = SimpleNamespace(healths=SimpleNamespace(remote=lambda: object()))
    with pytest.raises(ServerError, match="the supervisor has ended: its process died"):
        subject.check()


def test_it_ends_with_a_killed_launcher():
    child = f"""
import os, subprocess, sys
sys.path[:] = {sys.path!r}
from cluster.commands import preflight, start
compiler = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), compiler.pid, flush=True)
preflight._end_with(int(sys.argv[1]))
"""
    program = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())], start_new_session=True)
time.sleep(1000)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    left = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(left) == 2 and all(map(_runs, left))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    _soon(lambda: not any(map(_runs, left)), "a killed launcher leaves its preflight")
