"""What a machine lacks, looked up by name: nothing is imported that nobody asked for."""

import pytest
import torch

from kernels.backends import select
from kernels.backends.config import KernelsConfig
from kernels.backends.missing import Missing

asked: list[str] = []


def _look(name: str, reason: str | None):
    def look() -> str | None:
        asked.append(name)
        return reason

    return look


@pytest.fixture
def missing() -> Missing:
    asked.clear()
    later = {"slow": _look("slow", "too old"), "fine": _look("fine", None)}
    return Missing({"shm": "no"}, {**later, "shm": _look("shm", "never asked")})


def test_only_what_is_asked_for_is_looked_up(missing: Missing) -> None:
    assert "shm" in missing and missing["shm"] == "no" and "other" not in missing
    assert asked == []
    assert missing.get("slow") == "too old" and "fine" not in missing
    assert asked == ["slow", "fine"]


def test_as_a_whole_it_is_a_mapping(missing: Missing) -> None:
    assert missing == {"shm": "no", "slow": "too old"} and len(missing) == 2
    both = missing | Missing({"native": "no C"}, {"late": _look("late", "-")})
    assert dict(both) == {"shm": "no", "native": "no C", "slow": "too old", "late": "-"}


def test_auto_asks_no_further_than_it_chooses() -> None:
    """What comes after the first that can run is not looked for; a name that is wanted is."""
    asked.clear()
    slow = {name: _look(name, "broken") for name in ("deepep", "deepep_low_latency", "deepgemm")}
    found = select.Capabilities("cuda", Missing({}, slow))
    shape = {"num_ranks": 2, "hidden_size": 256, "expert_width": 128}
    chosen = select.select(KernelsConfig(), found, dtype=torch.bfloat16, **shape)
    assert chosen.names()["grouped_gemm"] == "triton" and asked == []
    with pytest.raises(select.BackendChoiceError, match="broken"):
        select.select(KernelsConfig(grouped_gemm="deepgemm"), found, dtype=torch.bfloat16, **shape)
    assert "deepgemm" in asked
