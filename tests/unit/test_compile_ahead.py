"""Compiling beside the start: only where something may have to be compiled, and never for longer than the server."""

import os
import time
from pathlib import Path

import pytest

from cluster import compile_ahead
from cluster.compile_ahead import CompileAhead
from cluster.config import PhalanxConfig, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
# Keeps the configuration it is given, and compiles for ever in a process of its own.
COMPILER = """#!/bin/sh
cat > config.json
sleep 1000 &
echo $! > compiler
wait
"""


def _config(*settings: str) -> PhalanxConfig:
    return load_config(CONFIGS / "local.yaml", list(settings))


def _starts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the process be COMPILER, and flashinfer be installed."""
    program = folder / "python"
    program.write_text(COMPILER)
    program.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(compile_ahead.sys, "executable", str(program))
    monkeypatch.setattr(compile_ahead, "find_spec", lambda name: name == "flashinfer")


def _content(path: Path) -> str:
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text().endswith(("}", "\n"))):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_is_told_the_configuration_and_ends_with_its_compilers(monkeypatch, tmp_path) -> None:
    _starts(monkeypatch, tmp_path)
    config = _config("cluster.device=cuda", "model.max_model_len=64")
    ahead = CompileAhead(config)
    try:
        assert PhalanxConfig.model_validate_json(_content(tmp_path / "config.json")) == config
        compiler = int(_content(tmp_path / "compiler"))
        assert _runs(compiler)
    finally:
        ahead.close()
    deadline = time.monotonic() + 10
    while _runs(compiler):
        assert time.monotonic() < deadline, f"process {compiler} still runs"
        time.sleep(0.01)


@pytest.mark.parametrize(("device", "found"), [("cpu", True), ("cuda", False), ("auto", False)])
def test_no_process_where_nothing_is_compiled(monkeypatch, tmp_path, device, found) -> None:
    _starts(monkeypatch, tmp_path)
    monkeypatch.setattr(compile_ahead, "find_spec", lambda name: found or None)
    CompileAhead(_config(f"cluster.device={device}")).close()
    assert os.listdir(tmp_path) == ["python"]


def test_one_that_has_ended_is_no_error(monkeypatch, tmp_path) -> None:
    _starts(monkeypatch, tmp_path)
    monkeypatch.setattr(compile_ahead.sys, "executable", "/bin/true")
    ahead = CompileAhead(_config("cluster.device=cuda"))
    time.sleep(0.1)
    ahead.close()


def test_without_a_gpu_there_is_nothing_to_compile() -> None:
    compile_ahead.compile_kernels(_config("cluster.device=auto"))
