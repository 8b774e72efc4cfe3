"""What the sweeps of exchanges and experts compute and write, without measuring anything."""

import argparse
import copy
import importlib
import json
import re
import shutil
import sys

import pytest
import torch

from kernels.routing.expert_map import ContiguousMap
from scripts.bench import (
    ROOT,
    all2all_plan,
    all2all_report,
    experts,
    experts_report,
    gpu_families,
    gpu_serving_report,
    results,
)

ARGS = argparse.Namespace(
    device="cuda",
    tokens=[1, 1024, 4096, 8192],
    sms_tokens=4096,
    ranks=4,
    dtype=torch.bfloat16,
    hidden=2048,
    width=768,
    experts=128,
    top_k=8,
    gemm="triton",
)
TIMES = {"us": 10.0, "apart_us": 12.0, "gemm_us": 100.0, "both_us": 103.0}


@pytest.mark.parametrize("rank", range(3))
def test_a_row_leaves_once_for_each_other_rank_that_needs_it(rank):
    expert_map = ContiguousMap(10, 3)
    generator = torch.Generator().manual_seed(rank)
    topk_idx_TK = torch.rand(40, 10, generator=generator).topk(4).indices
    topk_idx_TK[torch.rand(40, 4, generator=generator) < 0.3] = -1
    owner = {e: owner for owner in range(3) for e in expert_map.slots_of(owner)}
    expected = sum(
        len({owner[e] for e in experts if e >= 0} - {rank}) for experts in topk_idx_TK.tolist()
    )
    assert all2all_report.useful_rows(topk_idx_TK, expert_map.starts, rank) == expected > 0


def test_rows_go_out_and_sums_come_back():
    assert all2all_report.useful_bytes(2.5, 4160, 4096) == 20640


@pytest.mark.parametrize(
    ("gemm", "exchange", "both", "share"),
    [(100, 40, 100, 1.0), (100, 40, 140, 0.0), (100, 40, 110, 0.75), (100, 40, 160, -0.5)],
)
def test_hidden_share(gemm, exchange, both, share):
    assert all2all_report.hidden_share(gemm, exchange, both) == share


def test_more_than_all_cannot_be_hidden():
    assert all2all_report.hidden_share(100.0, 40.0, 98.0) == 1.0


def test_figures_follow_from_times():
    found = all2all_report.figures(TIMES, 1_000_000)
    assert found == TIMES | {"gb_per_s": 100.0, "hidden": 0.75}


def test_a_size_that_a_backend_refuses_is_listed_with_the_reason():
    parts, refused = all2all_plan.plan(ARGS, {}, "deepep_low_latency")
    assert {part.variant.name: part.tokens for part in parts} == {
        "deepep_low_latency": [1, 1024],
        "deepep_low_latency fp8": [1, 1024],
    }
    assert set(refused) == {f"{part.variant.name} with 4,096, 8,192 tokens" for part in parts}
    assert all("1024" in reason for reason in refused.values())


def test_a_backend_that_is_missing_is_listed_once():
    unavailable = {"all2all.deepep": "deep_ep is not installed"}
    parts, refused = all2all_plan.plan(ARGS, unavailable, "deepep")
    assert (parts, refused) == ([], {"deepep": "deep_ep is not installed"})


def test_limits_on_sms_are_swept_at_one_size_and_some_at_all():
    parts, refused = all2all_plan.plan(ARGS, {}, "symm")
    assert refused == {}
    tokens = {part.variant.num_sms: part.tokens for part in parts}
    assert set(tokens) == {None, *all2all_plan.COMM_SMS}
    assert tokens[16] == tokens[None] == ARGS.tokens and tokens[4] == [4096]


def test_the_two_low_latency_variants_bring_what_their_products_take():
    parts, _ = all2all_plan.plan(ARGS, {}, "deepep_low_latency")
    assert [part.selection.grouped_gemm.name for part in parts] == ["deepgemm", "deepgemm_fp8"]


def exchanges() -> dict:
    """Results of three variants, of which one has a size and a limit on SMs only."""
    found = {
        "date": "2026-01-02",
        "commit": "abc",
        "hardware": "4 x GPU",
        "versions": {"torch": "2"},
        "shape": {"hidden": 8, "width": 4, "experts": 4, "top_k": 2, "dtype": "bfloat16"},
        "gemm": "triton",
        "rounds": 3,
        "in_graph": 6,
        "link_bytes_per_s": 380e9,
        "sum_bytes": 16,
        "sms_tokens": 4096,
        "tokens": {},
        "backends": {},
        "missing": {"deepep": "not installed"},
    }
    for tokens, rows in ((1, 2.5), (4096, 10_000.0)):
        found["tokens"][str(tokens)] = {"sent_rows": rows, "floor_us": 0.5, "here_us": 3.0}
    reports = []
    for name, limit, sizes in (("fast", None, (1, 4096)), ("slow", None, (1,)), ("l", 8, (4096,))):
        variant = {"name": name, "backend": "symm", "num_sms": limit, "sms_only": limit is not None}
        reports.append({"variant": variant, "about": {"graph": name != "slow", "row_bytes": 32}})
        times = TIMES | {"us": 20.0 if name == "slow" else 10.0}
        times |= {"rest_us": 130.0} if limit else {}
        reports += [{"variant": variant, "tokens": size, "times": times} for size in sizes]
    all2all_report.add(found, reports)
    return found


def test_the_table_of_exchanges():
    assert all2all_report.tokens_table(exchanges()).splitlines() == [
        "| tokens a rank | floor | here | fast | slow * |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 1 | 0.5 | 3 | **10** / 0 / 75 % | 20 / 0 / 75 % |",
        "| 4,096 | 0.5 | 3 | **10** / 48 / 75 % | - |",
    ]


def test_the_table_of_sms():
    *_, row = all2all_report.sms_table(exchanges()).splitlines()
    assert row == "| symm | 8 | 12 | 100 | 130 | 103 | 1.07 | 75 % |"


def test_a_page_keeps_the_notes_that_a_person_added(tmp_path):
    found, out = exchanges(), tmp_path / "x"
    plots = []
    for _ in range(2):
        results.write(out, found, all2all_report.page, lambda found, out: plots.append(out))
        page = out.with_suffix(".md").read_text()
        assert "- not measured: deepep: not installed" in page
        out.with_suffix(".md").write_text(page + "\n## Notes\n\nmine\n")
    assert page.count("## Notes") == 1 and page.endswith("\n## Notes\n\nmine\n")
    assert plots == [out] * 2


@pytest.mark.parametrize("name", ["all2all", "timeline", "gpu_serving"])
def test_published_results_are_redrawn_and_keep_their_notes(name, tmp_path, monkeypatch):
    published = ROOT / "docs" / "results" / f"gpu-{name.removeprefix('gpu_')}.json"
    out = tmp_path / published.stem
    shutil.copy(published, tmp_path)
    old = published.with_suffix(".md").read_text()
    notes = results.kept_notes(old) or "\n## Notes\n\nmine\n"
    out.with_suffix(".md").write_text("# Another page\n" + notes)
    monkeypatch.setattr(sys, "argv", [name, "--redraw", "--out", str(out)])
    importlib.import_module(f"scripts.bench.{name}").main()
    page = out.with_suffix(".md").read_text()
    assert page.splitlines()[0] == old.splitlines()[0]
    assert page.endswith(notes) and page.count("\n## Notes\n") == 1
    for picture in re.findall(r"!\[.*\]\((.*)\)", page):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_what_is_saved_is_loaded_with_short_lists_on_one_line(tmp_path):
    found = {"a": [1, [2.5, "x"], []], "text": "of [\n 1 ]", "method": "[ 2 ]"}
    results.save(tmp_path / "new" / "x", found)
    assert results.load(tmp_path / "new" / "x") == found
    assert '[2.5, "x"]' in (tmp_path / "new" / "x.json").read_text()


def test_only_the_gpus_that_were_used_are_named(monkeypatch):
    gpus = ["H200, 1 MiB"] * 4
    monkeypatch.setattr(results.machine, "hardware", lambda: {"gpus": list(gpus), "cpu": "CPU"})
    assert results.devices(results.origin(2, "abc")) == "2 x H200"
    assert results.devices(results.origin(0, "abc")) == "CPU"
    assert "; commit abc, 20" in results.origin_line(results.origin(1, "abc"))


def test_the_plot_of_exchanges_is_drawn_with_what_is_missing(tmp_path):
    all2all_report.plot(exchanges(), tmp_path / "x")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


SHAPE = {"experts": 128, "local_experts": 32, "top_k": 8, "hidden": 2048, "width": 768}


def test_floors_of_experts():
    # Ten experts of 9,437,184 bytes and 4 tokens of 4,096 bytes in and out; 75.5 GFLOP.
    few = experts_report.floors(32, 10, 4, SHAPE, fp8=False)
    assert few["floor_us"] == few["memory_floor_us"] == 23.6
    many = experts_report.floors(8000, 32, 1000, SHAPE, fp8=False)
    assert many["floor_us"] == many["compute_floor_us"] == 100.66
    assert experts_report.floors(8000, 32, 1000, SHAPE, fp8=True)["compute_floor_us"] == 50.33


def test_tokens_per_expert():
    assert experts_report.tokens_per_expert(8192, SHAPE) == 2048
    assert experts_report.tokens_per_expert(1, SHAPE) == 0.25


def measured_experts() -> dict:
    """Results of two formats, of which one was measured in one size only."""
    found = {
        "date": "2026-01-02",
        "commit": "abc",
        "hardware": {"gpus": ["GPU, 1 MiB"], "cpu": "CPU"},
        "versions": {"torch": "2"},
        "shape": SHAPE,
        "dtype": "bfloat16",
        "rounds": 3,
        "in_graph": 9,
        "layers": 3,
        "ceilings": {"memory_bytes_per_s": 4e12, "bf16_flops": 75e13, "fp8_flops": 15e14},
        "tokens": [1, 1024],
        "backends": {},
        "missing": {"deepgemm": "too old"},
    }
    small, large = ({"rows": rows, "used_experts": used} for rows, used in ((8, 7), (8192, 32)))
    times = {"products_us": 100.0, "us": 120.0}
    reports = [
        {"variant": "a", "about": {"fp8": False, "graph": True}},
        {"variant": "a", "tokens": 1, "times": times, **small},
        {"variant": "a", "tokens": 1024, "times": times, **large},
        {"variant": "b masked", "about": {"fp8": True, "graph": False}},
        {"variant": "b masked", "tokens": 1, "times": {"products_us": 50.0}, **small},
    ]
    experts_report.add(found, reports)
    return found


def test_the_table_of_experts():
    assert experts_report.table(measured_experts()).splitlines() == [
        "| tokens a rank | per expert | floor | FP8 floor | a | b masked * |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 | 0.25 | 16.52 | 8.27 | **100** / 0.8 / 120 | 50 / 1.5 / - |",
        "| 1,024 | 256 | 103.08 | - | **100** / 773.1 / 120 | - |",
    ]


def test_the_page_and_the_plot_of_experts(tmp_path):
    results.write(tmp_path / "x", measured_experts(), experts_report.page, experts_report.plot)
    assert "- not measured: deepgemm: too old" in (tmp_path / "x.md").read_text()
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_more_tokens_than_the_masked_layout_gets_are_listed():
    args = argparse.Namespace(**vars(ARGS), backends=["deepgemm", "triton"])
    able, refused = experts.plan(args, {"grouped_gemm.triton": "triton is not installed"})
    assert able == ["deepgemm"]
    assert refused == {
        "triton": "triton is not installed",
        "deepgemm masked with 4,096, 8,192 tokens": "the exchange that brings masked rows takes "
        "1,024 of a rank",
    }
    assert experts.sizes(args, "masked") == [1, 1024]


def test_a_second_server_is_compared_load_by_load():
    report = json.loads((ROOT / "docs" / "results" / "gpu-serving.json").read_text())
    slower = copy.deepcopy(report["loads"])
    for load in slower:
        load["result"]["total_tokens_per_s"] /= 1.25
    report["against"] = {"settings": ["overlap.mode=off"], "loads": slower}
    page = gpu_serving_report.page(report, "gpu-serving")
    assert page.count("| 1.250 |") == len(slower) and "with overlap.mode=off" in page


def test_the_page_of_released_shapes_is_drawn_from_its_files():
    page = gpu_families.page(gpu_families.reports(gpu_families.RESULTS))
    assert gpu_families.PAGE.read_text().startswith(page)
    assert page.count("| deepseek-v3 | FP8 | 8 |") == 2 and "| 8,084 | 6,614 / 7,936 |" in page
