"""Greedy tokens and logits of prompts with images equal transformers', in chunks, with prefixes, behind preemptions."""

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.engine_harness import rank_config, run_engines
from tests.distributed.reference import Reference, check
from tests.image_case import FAMILIES, Prompt, arrivals, image_checkpoint, prompts, references
from workers.models.registry import load_model_config

COUNT = 10


@cache
def case(folder: Path, family: str) -> tuple[Path, list[Prompt], list[Reference]]:
    """Checkpoint, prompts and what transformers generates."""
    path = image_checkpoint(folder / family, family)
    spec = load_model_config(path).vision
    assert spec is not None
    asked = prompts(spec, COUNT)
    return path, asked, references(path, asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_equal_transformers(rank_pool, folder: Path, family: str) -> None:
    path, asked, expected = case(folder, family)
    config = rank_config(path, 1)
    results = run_engines(rank_pool, config, arrivals(asked, 1), keep_logits=True)
    check(expected, results, COUNT)
