"""flashinfer's modules are compiled for the masks that layers use; again for more; whole where they cannot be cut."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.attention.flashinfer_modules import Wanted, compile_missing, seal_modules
from kernels.attention.flashinfer_units import (
    CAUSAL,
    MASKS,
    NONE,
    UNUSED_SHAPES,
    compiled_masks,
    cut,
)
from kernels.host import cache_folder
from kernels.host.cuda_environment import share_compiled_kernels

NAME = "batch_prefill_sm90"
BUILDS: list[list[str]] = []  # the sources of each build


@dataclass
class Module:
    """What a JitSpec of flashinfer does, with a compiler that takes no time."""

    folder: Path
    sources: list[Path]
    extra_cuda_cflags: list[str]
    name: str = NAME
    is_aot: bool = False
    failing: str = "\n"

    @property
    def build_dir(self) -> Path:
        return self.folder / "cached_ops" / self.name

    @property
    def jit_library_path(self) -> Path:
        return self.build_dir / f"{self.name}.so"

    @property
    def lock_path(self) -> Path:
        return self.folder / "lock"

    @property
    def is_compiled(self) -> bool:
        return self.jit_library_path.exists()

    def write_ninja(self) -> None:
        self.build_dir.mkdir(parents=True, exist_ok=True)
        lines = [*map(str, self.sources), *self.extra_cuda_cflags]
        (self.build_dir / "build.ninja").write_text("\n".join(lines))

    def build(self, verbose: bool, need_lock: bool = True) -> None:
        assert not need_lock, "the caller has the lock"
        BUILDS.append([source.stem for source in self.sources])
        if self.failing in (self.build_dir / "build.ninja").read_text().replace("\n", " "):
            raise RuntimeError(
                "Ninja build failed. Ninja output:\n[1/2] nvcc\nx.cu(3): error: no type"
            )
        self.jit_library_path.write_text("library")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    BUILDS.clear()
    monkeypatch.setattr(cache_folder, "_chosen", None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    share_compiled_kernels(os.environ, str(tmp_path))
    names = [f"{kind}_kernel_mask_{mask}" for mask in range(4) for kind in ("paged", "ragged")]
    sources = [tmp_path / f"{name}.cu" for name in (*names, NAME, "binding")]
    for source in sources:
        source.write_text("return DISPATCH_context(x);" if source.stem == NAME else "kernel")
    return Module(tmp_path, sources, ["-O3", UNUSED_SHAPES])


def of_masks(*masks: str) -> list[str]:
    numbers = [MASKS.index(mask) for mask in masks]
    units = [f"{kind}_kernel_mask_{mask}" for mask in numbers for kind in ("paged", "ragged")]
    return [*units, f"{'_'.join(masks)}_{NAME}", "binding"]


def test_a_cut_module_has_the_units_of_its_masks_and_a_choice_among_them(module: Module) -> None:
    found = cut(module, {CAUSAL})
    assert [source.stem for source in found.sources] == of_masks(CAUSAL)
    assert found.extra_cuda_cflags == ["-O3"] and len(module.sources) == 10
    text = found.sources[2].read_text()
    assert "case MaskMode::kCausal:" in text and "MaskMode::kNone" not in text
    assert f'#include "{NAME}.cu"' in text and "compiled for kCausal alone" in text
    assert text.count("{") == text.count("}")
    both = cut(module, (CAUSAL, NONE)).sources[4]
    assert both.stem == f"kNone_kCausal_{NAME}" and both.read_text().count("case MaskMode") == 2


def test_a_source_that_is_the_same_is_not_compiled_again(module: Module) -> None:
    run = cut(module, {CAUSAL}).sources[2]
    os.utime(run, (1, 1))
    cut(module, {CAUSAL})
    assert run.stat().st_mtime == 1


def test_a_module_without_choice_keeps_its_sources(module: Module) -> None:
    module.sources = module.sources[-1:]
    compile_missing([Wanted(module, ())] * 2)
    assert BUILDS == [["binding"]]
    compile_missing([Wanted(module, ())])
    assert len(BUILDS) == 1


def test_a_server_with_another_mask_compiles_again_for_the_masks_of_both(module: Module) -> None:
    compile_missing([Wanted(module, (CAUSAL,))])
    compile_missing([Wanted(module, (CAUSAL,))])
    assert [of_masks(CAUSAL)] == BUILDS and compiled_masks(module) == {CAUSAL}
    compile_missing([Wanted(module, (NONE,))])
    compile_missing([Wanted(module, (CAUSAL,)), Wanted(module, (NONE, CAUSAL))])
    assert BUILDS[1:] == [of_masks(NONE, CAUSAL)]
    assert compiled_masks(module) == {NONE, CAUSAL} and module.is_compiled


def test_a_sealed_module_keeps_its_masks(module: Module) -> None:
    compile_missing([Wanted(module, (CAUSAL,))])
    assert seal_modules(module.folder) == 1
    compile_missing([Wanted(module, (CAUSAL,))])
    assert len(BUILDS) == 1
    compile_missing([Wanted(module, (NONE,))])
    assert BUILDS[1:] == [of_masks(NONE, CAUSAL)]


def test_a_module_of_an_earlier_version_has_all_masks(module: Module) -> None:
    module.write_ninja()
    module.jit_library_path.write_text("library")
    compile_missing([Wanted(module, (NONE, CAUSAL))])
    assert not BUILDS


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("the cut unit", "x.cu(3): error: no type"), ("the form", "generates other units")],
)
def test_what_cannot_be_cut_is_compiled_whole(
    module: Module, caplog: pytest.LogCaptureFixture, broken: str, reason: str
) -> None:
    if broken == "the form":
        module.sources.pop(0), module.sources.pop(0)
    else:
        module.failing = f"kCausal_{NAME}"
    with caplog.at_level(logging.WARNING):
        compile_missing([Wanted(module, (CAUSAL,))])
    assert BUILDS[-1] == [source.stem for source in module.sources]
    assert UNUSED_SHAPES in (module.build_dir / "build.ninja").read_text()
    assert compiled_masks(module) == set(MASKS) and module.is_compiled
    [line] = caplog.messages
    assert line.startswith(f"{NAME} is compiled for all masks") and line.endswith(reason)


def test_a_compiler_that_fails_is_an_error(module: Module) -> None:
    module.failing = "-O3"
    with pytest.raises(RuntimeError, match="error: no type"):
        compile_missing([Wanted(module, (CAUSAL,))])
    assert not module.is_compiled


def test_in_the_folder_of_other_programs_modules_are_whole(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "FLASHINFER_WORKSPACE_BASE", str(module.folder))
    compile_missing([Wanted(module, (CAUSAL,))])
    assert [[source.stem for source in module.sources]] == BUILDS
    assert compiled_masks(module) == set(MASKS)
