"""The backends that a machine cannot run, probed by name: no package is imported before its backend is looked up."""

from dataclasses import replace

import pytest

from kernels.backends import select
from kernels.interface.config import KernelsConfig
from kernels.interface.unavailable import Unavailable
from tests.unit.test_kernels_select import CUDA

probed: list[str] = []


def _probe(name: str, reason: str | None):
    def probe() -> str | None:
        probed.append(name)
        return reason

    return probe


@pytest.fixture
def unavailable() -> Unavailable:
    probed.clear()
    return Unavailable({"slow": _probe("slow", "too old"), "fine": _probe("fine", None)})


def test_only_what_is_looked_up_is_probed_and_once(unavailable: Unavailable) -> None:
    assert probed == []
    assert unavailable["slow"] == unavailable.get("slow") == "too old"
    assert "fine" not in unavailable and unavailable.get("fine") is None
    assert probed == ["slow", "fine"]
    with pytest.raises(KeyError):
        unavailable["no such backend"]


def test_as_a_whole_it_is_a_mapping(unavailable: Unavailable) -> None:
    assert unavailable == {"slow": "too old"} and len(unavailable) == 1


def test_auto_probes_no_further_than_it_chooses() -> None:
    """A backend after the first that can run is not probed; one that the configuration names is."""
    probed.clear()
    absent = {"grouped_gemm.deepgemm": "broken", "all2all.deepep": "broken"}
    found = Unavailable(
        {
            f"{seam}.{name}": _probe(f"{seam}.{name}", absent.get(f"{seam}.{name}"))
            for seam, names in select.SEAMS.items()
            for name in names
        }
    )
    shape = replace(CUDA, hidden_size=256, moe_intermediate_size=128)
    chosen = select.select(KernelsConfig(), found, shape)
    assert probed == ["all2all.copy_engine", "grouped_gemm.triton", "attention.flashinfer"]
    assert chosen.names()["grouped_gemm"] == "triton"
    with pytest.raises(select.BackendChoiceError, match="broken"):
        select.select(KernelsConfig(grouped_gemm="deepgemm"), found, shape)
    assert "grouped_gemm.deepgemm" in probed
