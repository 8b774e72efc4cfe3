"""The section `lora`: problems by key, paths and ids of adapters, memory in `phalanx check`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from cluster.commands.check import check
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from kernels.four_bit_format import FourBitFormat
from kernels.interface.registry import SEAMS, backend_class
from tests.adapter_case import make_adapter
from tests.unit.model_case import small_checkpoint
from workers.adapters.layout import slots_bytes
from workers.lora_config import LoadedAdapter
from workers.models.registry import load_model_config
from workers.rank.backend_choice import backend_shape

Q = {"model.layers.0.self_attn.q_proj": (64, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter-settings")
    small_checkpoint(folder / "model")
    make_adapter(folder / "fr", Q)
    make_adapter(folder / "wide", Q, rank=20)
    expert = "layers.0.mlp.experts.3.up_proj"
    make_adapter(folder / "twice", {expert: (32, 64), f"model.{expert}": (32, 64)})
    return folder


def written(folder: Path, lora: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(f"model: {{path: model}}\ncluster: {{device: cpu}}\nlora: {lora}\n")
    return path


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("{adapters: [{name: a, path: fr}]}", ["lora.adapters", "1 adapters need lora.max_loras"]),
        (
            "{max_loras: 1, max_cpu_loras: 1, adapters: [{name: a, path: fr}, {name: b, path: fr}]}",
            ["lora.adapters", "more than lora.max_cpu_loras (1)"],
        ),
        (
            "{max_loras: 1, adapters: [{name: a, path: fr}, {name: a, path: fr}]}",
            ["two adapters have the name 'a'"],
        ),
        ("{max_loras: 1, adapters: [{name: model, path: fr}]}", ["name of the model"]),
        ("{max_loras: 1, targets: [norms]}", ["lora.targets", "norms"]),
        ("{max_loras: -1}", ["lora.max_loras"]),
    ],
)
def test_problems_name_the_key(folder: Path, lora: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(folder, lora))
    for word in words:
        assert word in str(refused.value)


def test_paths_start_at_the_yaml_and_ids_at_one(folder: Path) -> None:
    lora = "{max_loras: 1, adapters: [{name: a, path: fr}, {name: b, path: /elsewhere}]}"
    config = resolve_rank_config(load_config(written(folder, lora)))
    assert config.adapters == (
        LoadedAdapter(id=1, name="a", path=str(folder / "fr")),
        LoadedAdapter(id=2, name="b", path="/elsewhere"),
    )
    fewer = config.model_copy(update={"adapters": ()})
    assert not config.differs_for_process(fewer), "adapters come and go in a process"
    more = config.lora.model_copy(update={"max_loras": 2})
    changed = config.model_copy(update={"lora": more})
    assert config.differs_for_process(changed) == ["lora.max_loras"]


def test_each_adapter_that_the_hub_does_not_give_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    paths = "{name: a, path: adapters/a}, {name: fr, path: fr}, {name: b, path: adapters/b}"
    config = load_config(written(folder, f"{{max_loras: 1, adapters: [{paths}]}}"))
    with pytest.raises(ConfigError) as refused:
        resolve_rank_config(config, num_gpus=0)
    problems = refused.value.problems
    assert [problem.key for problem in problems] == ["lora.adapters"] * 2
    for name, problem in zip("ab", problems, strict=True):
        assert problem.message.startswith(f"{name}: 'adapters/{name}' is no folder here")
        assert "model.path" not in problem.message


def test_check_shows_the_memory_of_the_slots(folder: Path) -> None:
    lora = "{max_loras: 3, max_rank: 8, targets: [attention], adapters: [{name: a, path: fr}]}"
    config = load_config(written(folder, lora))
    report = check(config, num_api_keys=1)
    # Of each of 3 layers: A of q, k, v and o, B of 128 and 64 outputs, in float32.
    (row,) = report.ranks
    values = 3 * (8 * 64 * 4 + 8 * (128 + 64))
    assert row.adapter_bytes == 3 * 4 * values
    ranks = resolve_rank_config(config)
    assert slots_bytes(load_model_config(folder / "model"), ranks, 0) == row.adapter_bytes
    without = check(load_config(written(folder, "{}")), num_api_keys=1)
    assert without.ranks[0].adapter_bytes == 0
    assert row.fixed_bytes - without.ranks[0].fixed_bytes == row.adapter_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wide", "wide: .*rank 20 is above lora.max_rank"),
        ("none", "none: .*none has no adapter_conf"),
        ("twice", "twice: .*3.up_proj and .*3.up_proj are adapters of one product"),
    ],
)
def test_check_refuses_adapters_that_do_not_fit(folder: Path, name: str, message: str) -> None:
    targets, adapter = "[attention, experts]", f"{{name: {name}, path: {name}}}"
    lora = f"{{max_loras: 1, targets: {targets}, adapters: [{adapter}]}}"
    with pytest.raises(ConfigError, match=message):
        check(load_config(written(folder, lora)), num_api_keys=1)


def test_check_refuses_targets_that_the_model_lacks(folder: Path) -> None:
    settings: dict[str, Any] = {"max_loras": 1, "targets": ["mlp"]}
    with pytest.raises(ConfigError, match=r"lora.targets.*the model has no products of mlp"):
        check(load_config(written(folder, str(settings))), num_api_keys=1)


def test_exchanges_that_carry_no_adapters_of_experts_are_refused(folder: Path) -> None:
    config = load_config(written(folder, "{max_loras: 1, targets: [experts]}"))
    shape = backend_shape(resolve_rank_config(config), load_model_config(folder / "model"))
    assert shape.row_ids == shape.top_k + 1
    released = {"hidden_size": 2048, "moe_intermediate_size": 768, "fp8_checkpoint": True}
    shape = replace(shape, num_ranks=2, device="cuda", dtype=torch.bfloat16, **released)
    shape = replace(shape, four_bit=FourBitFormat("mxfp4", 32))
    refused = {
        seam: [
            name
            for name in SEAMS[seam]
            if "lora.targets" in (backend_class(seam, name).unsupported_reason(shape) or "")
        ]
        for seam in ("all2all", "grouped_gemm")
    }
    assert refused["all2all"] == ["deepep", "deepep_hosts", "deepep_low_latency"]
    assert not refused["grouped_gemm"]
    without = replace(shape, expert_adapters=False)
    for seam, names in refused.items():
        for name in names:
            reason = backend_class(seam, name).unsupported_reason(without)
            assert "lora.targets" not in (reason or "")
