"""The page of the benchmark of images has each figure beside its target."""

from scripts.bench.image_report import page

ORIGIN = {
    "date": "2026-11-27T22:07:32+00:00",
    "commit": "abc",
    "clean_tree": True,
    "hardware": {"cpu": "a processor", "gpus": ["NVIDIA H200, 143771 MiB"]},
    "versions": {"torch": "2.11.0"},
    "load": {"model": "A small model", "side": 1024, "layers": None, "settings": []},
}


def test_rows_have_figures_and_targets() -> None:
    tower = {"images": 8, "rate_tflops_per_s": 750.0, "share_of_rate": 0.5313}
    row = {"limit": "at most 256 tokens", "beside": "images", "p50_ms": 12.84, "p99_ms": 17.26}
    row |= {"p99_of_quiet": 1.326, "first_token_ms": 131.4}
    quiet = {"limit": "-", "beside": "nothing", "p50_ms": 12.8, "p99_ms": 13.0, "p99_of_quiet": 1.0}
    streams = {"streams": 64, "per_second": 2.0, "prompt_tokens": 1280, "rows": [quiet, row]}
    text = page(ORIGIN | {"tower": tower, "streams": streams}, "gpu-images")
    assert "1 x NVIDIA H200; torch 2.11.0; commit abc, 2026-11-27. A small model" in text
    assert "as a share of 750 TFLOP/s | 0.53 | at least 0.40 | 0.55 |" in text
    assert "| - | nothing | 12.8 | 13.0 | 1.00 | - |" in text
    assert "| at most 256 tokens | images | 12.8 | 17.3 | 1.33 | 131 |" in text
    assert "p99 is at most 1.5 times that of the streams alone, further target 1.2" in text
    assert "64 streams" in text and "1,280 tokens" in text


def test_a_page_of_the_first_part_alone_has_no_other() -> None:
    """Parts are saved one by one."""
    found = {"in_flight": 32, "image_tokens": 1024, "text_tokens": 256, "output_tokens": 128}
    text = page(ORIGIN | {"one_image_each": found | {"of_sum_alone": 0.9316}}, "gpu-images")
    assert "| 0.93 | at least 0.80 | 0.95 |" in text and "Gaps" not in text
