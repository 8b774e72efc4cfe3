"""The page of scripts.bench.kv_tier has the parts that were measured."""

import json

import pytest

from scripts.bench.kv_tier_report import page
from tests import claims


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("gpu-kv-tier-qwen3", ("| prompts | server |", "Restores: 36.5 GB/s"), "SIGKILL"),
        ("cpu-kv-kill", ("SIGKILL for a rank under 32 streams", "of the killed rank"), "Restores"),
        ("gpu-kv-kill", ("| of the killed rank | host tier | 20.30 |",), "of other ranks"),
    ],
)
def test_page_has_the_measured_parts(name: str, has: tuple[str, ...], lacks: str) -> None:
    found = page(json.loads((claims.RESULTS / f"{name}.json").read_text()), name)
    assert all(part in found for part in has) and lacks not in found
    assert "\n\n\n" not in found
