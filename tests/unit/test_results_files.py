"""Every figure under docs/results can be traced: commit, date, hardware and the state of the tree."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
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


def test_pages_link_to_results_that_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"\]\(([^)#:]+\.(?:json|md|png))\)", page.read_text()):
            assert (page.parent / name).exists(), f"{page.name} links to {name}"


def load(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())


def row(page: str, beginning: str) -> list[str]:
    """The cells behind the first one of the table row that begins so."""
    (line,) = [x for x in (ROOT / page).read_text().splitlines() if x.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_comparison_with_vllm_in_the_readme_is_that_of_its_file():
    loads = load("vllm-comparison")["loads"]
    for beginning, number, key in (
        ("512 / 1,024", 0, "output_tokens_per_s"),
        ("128 / 128", 1, "output_tokens_per_s"),
        ("256 / 4,096", 2, "tokens_per_s"),
        ("512, mixed", 3, "output_tokens_per_s"),
        ("4 / 512", 4, "ms_per_token"),
        ("start to first answer, nothing", 5, "seconds"),
    ):
        entry, cells = loads[number], row("README.md", beginning)
        wanted = [f"{entry[server][key]:,}" for server in ("phalanx", "vllm")]
        assert [cell.split(" ")[0] for cell in cells] == [*wanted, f"{entry['ratio']:.2f}"]


def test_the_speed_on_cpus_in_the_readme_is_that_of_its_file():
    servers = load("cpu-local")["servers"].values()
    small, large = next(iter(servers))["loads"]
    for beginning, name in (("**8 in flight", small), ("**32 in flight", large)):
        medians = [server["loads"].get(name, {}).get("median") for server in servers]
        wanted = [f"{m['output_tokens_per_s']:,.0f}" if m else "-" for m in medians]
        assert row("README.md", beginning) == wanted
    for beginning, key in (("first token", "ttft_ms"), ("per output token", "tpot_ms")):
        times = [server["loads"][small]["median"][key] for server in servers]
        wanted = [f"{time['p50']:.1f} / {time['p99']:.1f}" for time in times]
        assert row("README.md", beginning) == wanted


def test_the_pauses_on_gpus_are_those_of_their_files():
    servers = load("gpu-recovery")["servers"] | load("gpu-recovery-shrink")["servers"]
    for beginning, server, number in (
        ("an error in a step", "plain", 0),
        ("SIGKILL of one of two ranks |", "plain", 1),
        ("SIGKILL of a single rank", "standby", 0),
        ("SIGKILL of one of two ranks, ", "shrink", 0),
    ):
        failure = servers[server]["failures"][number]
        pause, _, serving = row("docs/operations.md", beginning)
        assert (pause, serving) == (f"{failure['pause_s']:.1f} s", f"{failure['serving_s']:.1f} s")


def test_the_stages_of_a_start_on_a_gpu_are_those_of_its_file():
    starts = [load("gpu-start")["starts"][name] for name in ("cold", "warm")]
    page = "docs/results/gpu-start.md"
    whole = [f"{start['start_to_first_answer_s']:.1f}" for start in starts]
    assert row(page, "**to the first answer")[:2] == [f"**{seconds}**" for seconds in whole]
    for stage in ("ray", "group", "weights", "kernels", "KV cache", "CUDA graphs"):
        wanted = [f"{start['stages_s'][stage]:.1f}" for start in starts]
        assert row(page, f"{stage} |") == wanted
    text = " ".join((ROOT / "docs/operations.md").read_text().split())
    assert f"all kernels took {starts[0]['stages_s']['kernels']} of {whole[0]} s" in text


def test_the_speed_of_fp8_on_one_gpu_is_that_of_its_files():
    for name, gpus in (("gpu-fp8-one", "1"), ("gpu-fp8-kv8", "1, cache in FP8")):
        for served in load(name)["loads"]:
            lengths = f"{served['in_flight']} / {served['input_len']} / {served['output_len']}"
            cells, found = row("docs/results/gpu-fp8.md", f"{gpus} | {lengths}"), served["result"]
            wanted = [f"{found[key]:,.0f}" for key in ("output_tokens_per_s", "total_tokens_per_s")]
            assert cells[1:3] == wanted
            assert cells[4] in (f"{found['itl_ms']['p50']:.1f}", "-")


def test_the_speed_over_two_hosts_is_that_of_its_file():
    layouts = load("cpu-hosts")["layouts"]
    for ranks in (2, 4):
        rates = [median(x["output_tokens_per_s"]) for x in layouts if x["ranks"] == ranks]
        wanted = [f"{rate / rates[0]:.2f}" for rate in rates[1:]]
        assert row("docs/operations.md", f"{ranks} | 0") == wanted
