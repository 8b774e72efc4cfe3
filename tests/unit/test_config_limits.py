"""Limits of a step that are left out: by the device, and so that those which are given fit. Numbers are finite."""

import os
from pathlib import Path

import pytest

from cluster.config.errors import ConfigError, leaf_schemas
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import (
    check_num_ranks,
    max_num_seqs,
    resolve_rank_config,
    resolve_scheduler,
)
from tests.checkpoints.writer import make_checkpoint


@pytest.fixture(scope="module")
def yaml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    checkpoint = make_checkpoint(folder / "tiny", num_layers=1, hidden_size=32)
    path = folder / "config.yaml"
    path.write_text(f"model: {{path: {checkpoint}}}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu"),
    [
        ([], (64, 2048), (256, 8192)),
        (["max_num_seqs=5000"], (5000, 5000), (5000, 8192)),
        (["max_num_batched_tokens=100"], (64, 100), (100, 100)),
        (["max_num_seqs=8", "max_num_batched_tokens=16"], (8, 16), (8, 16)),
        (["chunked_prefill=false"], (64, 4096), (256, 8192)),
    ],
)
def test_limits_of_a_step_follow_the_device(
    yaml_path: Path, settings: list[str], on_cpu: tuple[int, int], on_gpu: tuple[int, int]
) -> None:
    config = load_config(yaml_path, [f"scheduler.{setting}" for setting in settings])
    for num_gpus, expected in ((0, on_cpu), (1, on_gpu)):
        scheduler = resolve_rank_config(config, num_gpus=num_gpus).scheduler
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == expected
        assert max_num_seqs(config, num_gpus) == expected[0]


def test_a_step_holds_the_longest_prompt_that_is_not_cut(yaml_path: Path) -> None:
    scheduler = load_config(yaml_path, ["scheduler.chunked_prefill=false"]).scheduler
    assert resolve_scheduler(scheduler, "cpu", 40_960).max_num_batched_tokens == 40_960


def test_a_limit_of_prompts_beside_decodes_needs_prompts_that_are_split(yaml_path: Path) -> None:
    limit = "scheduler.max_prefill_tokens_with_decodes=512"
    assert load_config(yaml_path, [limit]).scheduler.max_prefill_tokens_with_decodes == 512
    with pytest.raises(ConfigError, match=r"a limit needs scheduler.chunked_prefill = true"):
        load_config(yaml_path, [limit, "scheduler.chunked_prefill=false"])


@pytest.mark.parametrize("other", ["max_prefill_tokens_with_decodes=512", "chunked_prefill=false"])
def test_a_target_that_would_be_ignored_is_an_error(yaml_path: Path, other: str) -> None:
    target = "scheduler.target_itl_ms=50"
    assert load_config(yaml_path, [target]).scheduler.target_itl_ms == 50
    with pytest.raises(ConfigError, match=r"scheduler.target_itl_ms: a target (adapts|needs)"):
        load_config(yaml_path, [target, f"scheduler.{other}"])


def test_more_ranks_than_this_machine_can_ever_hold_are_refused(yaml_path, monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2_000_000}  # 8.2 GB
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    check_num_ranks(load_config(yaml_path, ["cluster.ranks=20"]))
    with pytest.raises(ConfigError, match=r"cluster.ranks: 21 ranks .* expected at most 20"):
        check_num_ranks(load_config(yaml_path, ["cluster.ranks=21"]))
    check_num_ranks(load_config(yaml_path, ["cluster.ranks=400", "cluster.ray_address=auto"]))


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_numbers_are_finite(yaml_path: Path, value: str) -> None:
    leaves = leaf_schemas(PhalanxConfig.model_json_schema())
    keys = [
        key
        for key, schema in leaves
        if any(arm.get("type") == "number" for arm in schema.get("anyOf", [schema]))
    ]
    assert {"cache.host_memory_gib", "cache.disk_gib", "cache.cpu_memory_gib"} < set(keys)
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_path, [f"{key}={value}" for key in keys])
    messages = {problem.key: problem.message for problem in caught.value.problems}
    assert messages.keys() == set(keys)
    assert all("finite number" in message for message in messages.values()), messages
