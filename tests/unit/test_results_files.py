"""Every figure under docs/results can be traced: commit, date, hardware and the state of the tree."""

import json
import re
from pathlib import Path

import pytest

from tests import claims
from tests.claims import ROOT, load

RESULTS = sorted(claims.RESULTS.glob("*.json"))
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("docs", "scripts", "configs") for page in (ROOT / folder).rglob("*.md")),
]
# Written before the measurements recorded the state of the tree; no name is to be added.
WITHOUT_TREE_STATE = {
    *("gpu-all2all", "gpu-attention", "gpu-experts", "gpu-loading", "gpu-overlap"),
    *("gpu-overlap-power", "gpu-overlap-streams", "gpu-overlap-turns"),
    *("gpu-serving-pair", "guidellm", "vllm-comparison"),
}
# Measured before the commit of what was measured, which `changes` names; no name is to be added.
WITH_CHANGES = {"gpu-start"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_its_origin(path: Path):
    found = json.loads(path.read_text())
    assert re.match(r"[0-9a-f]{7}", found["commit"])
    assert "+" not in found["commit"], "a + is a tree with changes"
    assert re.match(r"20\d\d-\d\d-\d\d", found["date"])
    assert found["hardware"]
    if path.stem in WITHOUT_TREE_STATE and found["clean_tree"] == "not recorded":
        return
    if path.stem in WITH_CHANGES and found["clean_tree"] is False:
        assert re.search(r"commit [0-9a-f]{7}\b", found["changes"])
        return
    assert found["clean_tree"] is True, "measure on a clean tree"


def test_pages_link_to_files_that_exist():
    found = [
        f"{page.relative_to(ROOT)} links to {name}"
        for page in PAGES
        for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / name).exists()
    ]
    assert not found, "\n".join(found)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_headings_find_their_heading():
    found = [
        f"{page.name} links to {name}#{anchor}"
        for page in PAGES
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
        if anchor not in anchors(page.parent / name if name else page)
    ]
    assert not found, "\n".join(found)


def row(page: str, beginning: str) -> list[str]:
    """The cells behind the first one of the table row that begins so."""
    (line,) = [x for x in (ROOT / page).read_text().splitlines() if x.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_ratios_to_vllm_are_those_of_the_figures():
    """Phalanx over vLLM for rates, vLLM over Phalanx for times; of the first figure of a load."""
    of_one = [one for loads in load("vllm-comparison-one-gpu")["models"].values() for one in loads]
    for entry in [*load("vllm-comparison")["loads"], *of_one]:
        if "ratio" not in entry:
            continue
        key, ours = next(iter(entry["phalanx"].items()))
        theirs = entry["vllm"][key]
        ratio = ours / theirs if key.endswith("tokens_per_s") else theirs / ours
        digits = len(str(entry["ratio"]).partition(".")[2])
        assert abs(ratio - entry["ratio"]) <= 0.51 * 10**-digits, entry


def test_the_stages_of_a_start_on_a_gpu_are_those_of_its_file():
    starts = [load("gpu-start")["starts"][name] for name in ("cold", "warm")]
    page = "docs/results/gpu-start.md"
    whole = [f"{start['start_to_first_answer_s']:.1f}" for start in starts]
    assert row(page, "**to the first answer")[:2] == [f"**{seconds}**" for seconds in whole]
    for stage in ("ray", "group", "weights", "kernels", "KV cache", "CUDA graphs"):
        wanted = [f"{start['stages_s'][stage]:.1f}" for start in starts]
        assert row(page, f"{stage} |") == wanted


def test_the_speed_of_fp8_is_that_of_its_files():
    h200 = {"gpu-fp8-pair": "2", "gpu-fp8-one": "1", "gpu-fp8-kv8": "1, cache in FP8"}
    h100 = {"gpu-serving-four-fp8": "4 H100", "gpu-serving-two-fp8": "2 H100"}
    for name, gpus in (h200 | h100).items():
        for served in load(name)["loads"]:
            lengths = f"{served['in_flight']} / {served['input_len']} / {served['output_len']}"
            cells, found = row("docs/results/gpu-fp8.md", f"{gpus} | {lengths}"), served["result"]
            wanted = [f"{found[key]:,.0f}" for key in ("output_tokens_per_s", "total_tokens_per_s")]
            assert cells[1:3] == wanted
            assert cells[4] in (f"{found['itl_ms']['p50']:.1f}", "-")
