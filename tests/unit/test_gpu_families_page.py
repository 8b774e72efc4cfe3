"""The page of released shapes, drawn from committed results."""

from pathlib import Path

from scripts.bench import gpu_families

NAME = "gpu-families-qwen36-35b-a3b-fp8"


def test_states_in_bfloat16_are_told_from_others() -> None:
    """Reports older than the setting have float32."""
    report = gpu_families.reports(Path(gpu_families.RESULTS))[NAME]
    cache = report["resolved"]["config"]["cache"]
    cache.pop("state_dtype", None)
    pages = []
    for states in (None, "float32", "bfloat16"):
        if states is not None:
            cache["state_dtype"] = states
        pages.append(gpu_families.page({NAME: report}))
    assert pages[0] == pages[1]
    assert pages[2] == pages[0].replace("| FP8 |", "| FP8, states bf16 |").replace(
        "qwen3.6-35b-a3b, FP8:", "qwen3.6-35b-a3b, FP8, states bf16:"
    )
    assert pages[2] != pages[0]
