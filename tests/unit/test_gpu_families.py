"""`auto` serves every family on Hopper GPUs by flashinfer or our kernels, decodes in CUDA graphs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu_families import released_shape, takes_latents
from tests.unit.test_kernels_select import CUDA, choose
from workers.models.registry import FAMILIES, load_model_config


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_the_fastest_that_can(tmp_path: Path, family: str) -> None:
    model = load_model_config(released_shape(tmp_path / "model", family, weights=False))
    shape = replace(
        CUDA,
        num_ranks=1,
        attention_specs=model.attention_specs,
        linear_specs=model.linear_specs,
    )
    selection = choose(shape)
    expected = "flashinfer_mla" if takes_latents(family) else "flashinfer"
    if family == "gpt_oss":
        expected = "triton"  # the only one with sinks and windows
    assert selection.attention.name == expected
    assert selection.graph_unsupported_reason is None
