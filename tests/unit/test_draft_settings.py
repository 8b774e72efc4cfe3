"""Settings of draft models: problems by key, memory in `phalanx check`."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cluster.commands.check import check
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from tests.checkpoints.eagle3 import make_eagle3
from tests.family_cases import family_checkpoint
from workers.models.draft_config import load_draft_config
from workers.models.registry import load_model_config
from workers.rank.device_memory import size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a target, draft models for it, and checkpoints whose config.json has a head."""
    folder = tmp_path_factory.mktemp("draft-settings")
    target = family_checkpoint(folder / "target", "qwen3_moe", "untied")
    make_eagle3(folder / "draft", load_model_config(target))
    make_eagle3(folder / "other", load_model_config(target), draft_vocab_size=64)
    empty = make_eagle3(folder / "empty", load_model_config(target))
    (empty / "model.safetensors").unlink()
    heads: dict[str, Any] = {"num_nextn_predict_layers": 1}
    family_checkpoint(folder / "heads", "glm4_moe", "tied", weights=False, **heads)
    family_checkpoint(folder / "headless", "glm4_moe", "tied", **heads)
    path = family_checkpoint(folder / "base", "glm4_moe", "tied", mtp=True, **heads)
    stored = load_file(path / "model.safetensors")
    base = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(base, path / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, speculation: dict[str, Any], model: str = "target", **fields: Any) -> Any:
    path = folder / f"{model}/hub"
    return load_config({"model": {"path": str(path), **fields}, "speculation": speculation})


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"method": "mtp"}, ["speculation.method", "qwen3_moe", "eagle3"]),
        ({"method": "eagle3"}, ["speculation.draft_model", "needs the folder"]),
        ({"method": "ngram", "draft_model": "draft"}, ["speculation.draft_model", "ngram has no"]),
        ({"method": "eagle3", "draft_model": "nowhere"}, ["speculation.draft_model", "nowhere"]),
        (
            {"method": "eagle3", "draft_model": "some/EAGLE3-name"},
            ["speculation.draft_model", "some/EAGLE3-name is not a folder", "not fetched from"],
        ),
        ({"method": "eagle3", "draft_model": "empty"}, ["speculation.draft_model", "no weights"]),
        ({"method": "eagle3", "draft_model": "target/hub"}, ["architectures", "Qwen3Moe"]),
        (
            {"method": "ngram", "accept_lengths": [0.5]},
            ["speculation.accept_lengths", "checkpoint", "dummy"],
        ),
        ({"method": "ngram", "accept_lengths": [1.5]}, ["speculation.accept_lengths", "1"]),
    ],
)
def test_problems_name_the_key(
    folder: Path, speculation: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # relative paths of a mapping start there
    with pytest.raises(ConfigError) as refused:
        load(folder, speculation)
    for word in words:
        assert word in str(refused.value)


def test_a_head_that_the_files_lack_is_refused(folder: Path) -> None:
    """By name, so random weights need none; without files the loader reports what is wrong."""
    with pytest.raises(
        ConfigError, match=r"speculation\.method: mtp .* files of weights there lack"
    ):
        load(folder, {"method": "mtp"}, "headless")
    load(folder, {"method": "mtp"}, "headless", weights="dummy")
    load(folder, {"method": "mtp"}, "heads")
    for method in ("mtp", "auto"):
        of_base = load(folder, {"method": method}, "base")  # names without the model's prefix
        assert resolve_rank_config(of_base).speculation.method == "mtp"


def test_random_weights_need_no_files_of_a_draft_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    load(folder, {"method": "eagle3", "draft_model": "empty"}, weights="dummy")


def test_a_draft_model_takes_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plain = resolve_rank_config(load(folder, {})).cache.num_blocks
    wanted = {"method": "eagle3", "draft_model": "draft"}
    drafting = load(folder, wanted)
    assert drafting.speculation.draft_model == str(folder / "draft")
    assert (
        resolve_rank_config(drafting).cache.num_blocks == plain * 12 // 13
    )  # a fourth layer, of a fourth of the width
    heads = load(folder, {"method": "mtp"}, "heads", weights="dummy")
    found = load_draft_config(heads.speculation, heads.model, load_model_config(heads.model.folder))
    assert found is not None and found.eagle is None and found.layers.num_layers == 1


@pytest.mark.parametrize(
    ("method", "model", "share"),
    [
        (
            {"method": "eagle3", "draft_model": "draft"},
            "target",
            "7.7 %",
        ),  # as above, 1 of 13 parts
        ({"method": "mtp"}, "base", "25.0 %"),  # a fourth layer
    ],
)
def test_check_names_the_memory_of_a_draft_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], model: str, share: str
) -> None:
    monkeypatch.chdir(folder)
    plain, drafting = (check(load(folder, it, model), num_api_keys=0) for it in ({}, method))
    weights = drafting.ranks[0].weight_bytes - plain.ranks[0].weight_bytes
    assert weights == drafting.ranks[0].draft_bytes > 0 and not plain.ranks[0].draft_bytes
    words = f"weights of the draft model {size(weights)}, its K and V {share} of each KV block"
    assert drafting.steps["speculation"].endswith(words) and weights > 1e5
    assert "draft model" not in plain.steps["speculation"]
