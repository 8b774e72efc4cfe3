"""Compiling the native kernels: kept, shared, and a clear reason where there is no compiler."""

import pytest
import torch

from kernels.backends.select import probe
from kernels.native import library
from kernels.routing import permute


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load.cache_clear()
    library.load_or_none.cache_clear()
    yield
    library.load.cache_clear()
    library.load_or_none.cache_clear()


def test_compiles_once(tmp_path, monkeypatch):
    if reason := library.native_unavailable():
        pytest.skip(reason)
    (compiled,) = (tmp_path / "phalanx").iterdir()
    library.load.cache_clear()
    library.load_or_none.cache_clear()
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
    unavailable = probe("cpu")
    assert says in unavailable["grouped_gemm.native"] and says in unavailable["attention.native"]


def test_routing_and_sums_are_the_same_without_it(monkeypatch):
    bounds = permute.expert_bounds(range(2, 7), "cpu")
    for seed in range(20):
        torch.manual_seed(seed)
        ids = torch.randint(-1, 9, (seed, 3))
        weights = torch.rand(seed, 3)
        results = []
        for native in (library.load_or_none(), None):
            monkeypatch.setattr(permute, "load_or_none", lambda native=native: native)
            routing = permute.route(ids, bounds)
            torch.manual_seed(seed)
            y = torch.randn(len(routing.row_R), 16)
            results.append((routing, permute.weighted_sum(y, routing, weights)))
        (one, sums), (other, other_sums) = results
        for name in ("pair_R", "row_R", "offs_e"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        torch.testing.assert_close(sums, other_sums)
