"""`phalanx compile` and `kernels.cache`: a folder of compiled kernels that works at another place."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.commands import compile as compiling
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from kernels.attention.flashinfer_modules import seal_modules
from kernels.host import cache_folder
from kernels.native import library

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "_chosen", None)


@pytest.fixture
def compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")


def run(*arguments: str | Path) -> Result:
    settings = ("--set", "cluster.device=cpu")
    return CliRunner().invoke(app, ["compile", str(CONFIG), *settings, *map(str, arguments)])


def test_on_a_cpu_the_folder_has_the_library_that_ranks_load(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("--out", tmp_path / "new" / "kernels")
    assert result.exit_code == 0, result.output
    assert "libraries: 1," in result.stdout and f"kernels.cache: {tmp_path}" in result.stdout
    shutil.move(tmp_path / "new" / "kernels", tmp_path / "shipped")
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("it is compiled already"))
    cache_folder.use_cache_folder(str(tmp_path / "shipped"))
    assert library.compiled_library().parent == tmp_path / "shipped"
    assert library.load.__wrapped__().linear is not None


def test_a_folder_with_files_and_a_machine_without_a_compiler_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("keep")
    result = run("--out", tmp_path)
    assert result.exit_code == 2 and "is not empty; expected a folder" in result.stderr
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run("--out", tmp_path / "kernels")
    assert result.exit_code == 2 and "no C compiler" in result.stderr


def test_on_gpus_the_ranks_start_once_with_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[PhalanxConfig] = []

    class Engine:
        def __init__(self, config: PhalanxConfig, *_: Any) -> None:
            started.append(config)
            folder = Path(str(config.kernels.cache)) / "deep_gemm"
            folder.mkdir()
            (folder / "kernel.cubin").write_bytes(b"1")

        def close(self) -> None:
            started.append(started[-1])

    monkeypatch.setattr("cluster.offline.engine.OfflineEngine", Engine)
    monkeypatch.setattr(compiling, "resolve_device", lambda config: "cuda")
    monkeypatch.setattr(library, "compiled_library", lambda: tmp_path)
    lines: list[str] = []
    config = load_config(CONFIG, ["cluster.ranks=2"])
    compiling.compile_kernels(config, tmp_path / "out", Console(), lines.append)
    assert len(started) == 2, "started and closed"
    assert started[0].model.weights == "dummy" and started[0].cluster.ranks == 2
    assert lines[0].startswith("GPU kernels: 1,")


def test_a_start_that_fails_leaves_no_folder_that_the_next_one_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: PhalanxConfig, *_: Any) -> None:
        Path(str(config.kernels.cache), "kernel.cubin").write_bytes(b"1")
        raise ValueError("this machine has 0 GPUs")

    monkeypatch.setattr("cluster.offline.engine.OfflineEngine", fail)
    monkeypatch.setattr(compiling, "resolve_device", lambda config: "cuda")
    monkeypatch.setattr(library, "compiled_library", lambda: tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="has 0 GPUs"):
            compiling.compile_kernels(load_config(CONFIG), tmp_path / "out", Console(), print)


def test_the_folder_of_a_configuration_is_relative_to_its_file(tmp_path: Path) -> None:
    model = load_config(CONFIG).model.path
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: {model}}}\nkernels: {{cache: shipped}}\n")
    assert load_config(path).kernels.cache == str(tmp_path / "shipped")


def built(folder: Path) -> Path:
    """A module as flashinfer leaves it behind: a library, an object, and a build file with the paths of sources."""
    module = folder / "flashinfer" / "0.6.6" / "90a" / "cached_ops" / "attention"
    module.mkdir(parents=True)
    source = folder / "generated.cu"
    source.write_text("kernel")
    (module / "build.ninja").write_text(
        "rule copy\n  command = cp $in $out\n"
        f"build kernel.o: copy {source}\nbuild attention.so: copy kernel.o\n"
    )
    ninja(module)
    return module


def ninja(module: Path) -> str:
    command = ["ninja", "-v", "-C", str(module), "-f", str(module / "build.ninja")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")
@pytest.mark.parametrize("sealed", [True, False])
def test_sealed_modules_are_not_built_again_at_another_place(tmp_path: Path, sealed: bool) -> None:
    """Without the seal ninja misses the sources of the first place."""
    module = built(tmp_path / "here")
    if sealed:
        assert seal_modules(tmp_path) == 1
        assert sorted(file.name for file in module.iterdir()) == ["attention.so", "build.ninja"]
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / module.relative_to(tmp_path / "here")
    if sealed:
        assert "no work to do" in ninja(moved)
        assert (moved / "attention.so").read_text() == "kernel"
    else:
        with pytest.raises(subprocess.CalledProcessError):
            ninja(moved)
