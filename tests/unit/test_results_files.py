"""Every figure under docs/results can be traced: commit, date, hardware and the state of the tree."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
# Written before the measurements recorded the state of the tree; no name is to be added.
WITHOUT_TREE_STATE = {
    *("gpu-all2all", "gpu-attention", "gpu-experts", "gpu-loading", "gpu-overlap"),
    *("gpu-overlap-power", "gpu-overlap-streams", "gpu-overlap-turns"),
    *("gpu-serving-pair", "guidellm", "vllm-comparison"),
}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_its_origin(path: Path):
    found = json.loads(path.read_text())
    assert re.match(r"[0-9a-f]{7}", found["commit"])
    assert "+" not in found["commit"], "a + is a tree with changes"
    assert re.match(r"20\d\d-\d\d-\d\d", found["date"])
    assert found["hardware"]
    if path.stem in WITHOUT_TREE_STATE and found["clean_tree"] == "not recorded":
        return
    assert found["clean_tree"] is True, "measure on a clean tree"


def test_pages_link_to_results_that_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"\]\(([^)#:]+\.(?:json|md|png))\)", page.read_text()):
            assert (page.parent / name).exists(), f"{page.name} links to {name}"
