"""Compiling the native kernels: kept, shared, and a clear reason where there is no compiler."""

import pytest

from kernels.native import library
from kernels.select import probe


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_compiles_once(tmp_path, monkeypatch):
    if "native" in probe("cpu").missing:
        pytest.skip(probe("cpu").missing["native"])
    (compiled,) = (tmp_path / "phalanx").iterdir()
    library.load.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    library.load()
    assert compiled.suffix == ".so"


@pytest.mark.parametrize(
    ("compiler", "says"), [("no-such-compiler", "no C compiler"), ("false", "exit code 1")]
)
def test_says_why_not(monkeypatch, compiler, says):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(library.NativeUnavailableError, match=says):
        library.load()
    assert says in probe("cpu").missing["native"]
