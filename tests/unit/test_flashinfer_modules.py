"""flashinfer's modules are compiled with few headers, and with all where that fails. Without flashinfer."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.attention.flashinfer_headers import write_headers
from kernels.attention.flashinfer_modules import compile_missing


@dataclass
class Module:
    """As flashinfer's JitSpec: the build file is written once, with the folders of that time."""

    build_dir: Path
    needs: str
    extra_include_dirs: list[Path] | None = None

    @property
    def ninja_path(self) -> Path:
        return self.build_dir / "build.ninja"

    @property
    def is_compiled(self) -> bool:
        return (self.build_dir / "module.so").exists()

    def build(self, verbose: bool) -> None:
        self.build_dir.mkdir(parents=True, exist_ok=True)
        if not self.ninja_path.exists():
            self.ninja_path.write_text(":".join(map(str, self.extra_include_dirs or ())))
        folders = [Path(folder) for folder in self.ninja_path.read_text().split(":") if folder]
        if any((folder / self.needs).exists() for folder in folders):
            raise RuntimeError(f"{self.needs} is empty")
        (self.build_dir / "module.so").write_text(self.ninja_path.read_text())


def modules(root: Path, needs: str) -> list[Module]:
    own = root / "own"
    return [Module(root / "cached_ops" / name, needs, [own]) for name in ("decode", "prefill")]


def test_modules_are_compiled_with_few_headers(tmp_path: Path) -> None:
    found = modules(tmp_path, "cute/tensor.hpp")
    compile_missing(found)
    folders = f"{tmp_path / 'headers'}:{tmp_path / 'own'}"
    assert [(module.build_dir / "module.so").read_text() for module in found] == [folders] * 2
    for module in found:
        module.needs = "cutlass/util/host_tensor.h"
    compile_missing(found)  # nothing is missing


def test_a_module_that_needs_more_headers_has_all(tmp_path: Path) -> None:
    found = modules(tmp_path, "cutlass/util/host_tensor.h")
    compile_missing(found)
    assert [(it.build_dir / "module.so").read_text() for it in found] == [str(tmp_path / "own")] * 2


def test_an_error_of_both_is_raised(tmp_path: Path) -> None:
    (tmp_path / "own" / "cute").mkdir(parents=True)
    (tmp_path / "own" / "cute" / "tensor.hpp").touch()
    with pytest.raises(RuntimeError, match="is empty"):
        compile_missing(modules(tmp_path, "cute/tensor.hpp"))


def test_headers_are_written_once(tmp_path: Path) -> None:
    write_headers(tmp_path)
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert len(files) == 16
    times = [file.stat().st_mtime_ns for file in files]
    write_headers(tmp_path)
    assert [file.stat().st_mtime_ns for file in files] == times
