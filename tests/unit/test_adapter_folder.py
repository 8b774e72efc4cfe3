"""Folders of adapters: what is read, and what is refused with which message."""

from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapter_case import make_adapter
from tests.checkpoints.families import names_of
from tests.family_cases import family_checkpoint
from tests.unit.model_case import SMALL, small_checkpoint
from workers.adapters.layout import AdapterLayout
from workers.adapters.peft_folder import PeftFolder
from workers.adapters.pools import AdapterPools
from workers.adapters.store import AdapterStore
from workers.lora_config import AdapterError, LoadedAdapter, LoraConfig
from workers.models.registry import load_model_config

Q, KV = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
MODULES = {Q: (64, 64), KV: (32, 64)}  # of SMALL
CPU = torch.device("cpu")


def stage(
    tmp_path: Path, folder: Path, lora: LoraConfig | None = None, **fields: Any
) -> torch.Tensor:
    """The host copy for a small model."""
    family = fields.get("family", "qwen3_moe")
    absent = {name: None for name in SMALL if names_of(family).get(name, name) is None}
    path = small_checkpoint(tmp_path / "model", weights=False, **absent, **fields)
    config = load_model_config(path)
    layout = AdapterLayout.of(config, lora or LoraConfig(max_loras=1), range(config.num_experts))
    pools = AdapterPools(layout, 1, device=CPU, dtype=torch.float32)
    return pools.stage(PeftFolder.read(folder))


def test_prefixes_and_roots_name_one_module(tmp_path: Path) -> None:
    """Adapters of causal models, of base models, of other towers, and with PEFT's name of the adapter."""
    expected = stage(tmp_path, make_adapter(tmp_path / "a", MODULES))
    assert expected.any()
    for number, prefix in enumerate(("", "base_model.model.language_model.")):
        folder = make_adapter(tmp_path / f"prefix-{number}", MODULES)
        file = folder / "adapter_model.safetensors"
        renamed = {
            name.replace("base_model.model.", prefix).replace(".weight", ".default.weight"): it
            for name, it in load_file(file).items()
        }
        save_file(renamed, file)
        assert torch.equal(stage(tmp_path, folder), expected)
    folder = make_adapter(tmp_path / "base", MODULES)
    file = folder / "adapter_model.safetensors"
    bare = {name.replace("model.layers", "layers"): it for name, it in load_file(file).items()}
    save_file(bare, file)
    assert torch.equal(stage(tmp_path, folder), expected)


def test_alpha_patterns_scale_single_modules(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", MODULES, alpha=8, alpha_pattern={"1.self_attn.k_proj": 2})
    config = PeftFolder.read(folder).config
    assert (config.declared(Q).factor, config.declared(KV).factor) == (2.0, 0.5)


def test_ranks_are_those_of_the_configuration(tmp_path: Path) -> None:
    """The factor on the product depends on the rank, so two values would mean two adapters."""
    with pytest.raises(
        AdapterError, match=r"has 4 rows, adapter_config.json has rank 8 \(r, rank_p"
    ):
        stage(tmp_path, make_adapter(tmp_path / "a", MODULES, rank=4, r=8))
    stage(tmp_path, make_adapter(tmp_path / "b", MODULES, rank=4, r=8, rank_pattern={".*proj": 4}))


def test_the_digest_follows_both_files(tmp_path: Path) -> None:
    digests = {
        PeftFolder.read(make_adapter(tmp_path / f"{number}", MODULES, **changes)).digest
        for number, changes in enumerate(({}, {"seed": 1}, {"alpha": 9}, {}))
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "not supported: use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is {'nblocks': 2}"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config is {'beta': 1.0}"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config is {'top_k': 3}"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga', which changes the ba"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq', which changes the base"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '\\('"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\]; expected an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern 'q_proj' is None; expected a number"),
        ({"alpha": "8"}, "lora_alpha is '8'; expected a number"),
        ({"alpha": 10**400}, "lora_alpha is 10+.*0; expected a number"),
        ({"r": 0}, "r is 0; expected a whole number"),
        ({"r": "4"}, "r is '4'; expected a whole number"),
        ({"r": 10**400}, "r is 10+.*0; expected a whole number"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern: '\\('"),
        ({"rank_pattern": {"(" * 9999: 1}}, "rank_pattern: '\\("),
        ({"rank_pattern": "x"}, "rank_pattern is 'x'; expected an object"),
        (
            {"rank_pattern": {"q_proj": 1.5}},
            "rank_pattern 'q_proj' is 1.5; expected a whole number",
        ),
    ],
)
def test_configurations_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        PeftFolder.read(make_adapter(tmp_path / "a", MODULES, **config))


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", MODULES)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, content = load_file(file), file.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(AdapterError, match=message):
            PeftFolder.read(folder)

    save_file({**tensors, "base_model.model.x.lora_magnitude_vector": torch.ones(1)}, file)
    refused("not supported: .*lora_magnitude_vector")
    save_file({name: it for name, it in tensors.items() if f"{Q}.lora_B" not in name}, file)
    refused(f"one of lora_A and lora_B is missing of {Q}")
    wrong = {name: it[:3].contiguous() if "lora_A" in name else it for name, it in tensors.items()}
    save_file(wrong, file)
    refused("has 3 rows and lora_B 4 columns")
    save_file({}, file)
    refused("holds no tensors")
    file.write_bytes(content[:-9])
    refused("is the copy complete")
    file.unlink()
    refused("has no adapter_model.safetensors$")
    (folder / "adapter_model.bin").touch()
    refused("save the adapter anew with PEFT")
    config.write_text("[]")
    refused("expected an object")
    config.write_text("{")
    refused("cannot be read")
    config.write_text("[" * 200_000)
    refused("adapter_config.json cannot be read: maximum recursion depth")
    config.unlink()
    refused("name a folder that PEFT saved")


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AdapterError, match=r"48 inputs and 64 outputs, the model 64 and 64: it was made"
    ):
        stage(tmp_path, make_adapter(tmp_path / "a", {Q: (64, 48)}))
    with pytest.raises(
        AdapterError, match=r"rank 17 is above lora.max_rank \(16\); set lora.max_rank: 17"
    ):
        stage(tmp_path, make_adapter(tmp_path / "b", MODULES, rank=17))
    unknown = {"model.layers.0.mlp.gate": (8, 64), "model.layers.7.self_attn.q_proj": (64, 64)}
    with pytest.raises(AdapterError) as caught:
        stage(tmp_path, make_adapter(tmp_path / "c", unknown))
    assert str(caught.value) == (
        "no place for model.layers.0.mlp.gate, model.layers.7.self_attn.q_proj; adapters may change "
        "self_attn.k_proj, self_attn.o_proj, self_attn.q_proj, self_attn.v_proj"
    )


def test_modules_of_a_draft_head_are_refused_as_such(tmp_path: Path) -> None:
    fields = {"mtp": True, "num_nextn_predict_layers": 1}
    config = load_model_config(family_checkpoint(tmp_path / "m", "glm4_moe", "tied", **fields))
    name = f"layers.{config.num_layers}.self_attn.q_proj"
    folder = make_adapter(tmp_path / "a", {f"model.{name}": (64, 64)})
    layout = AdapterLayout.of(config, LoraConfig(max_loras=1), ())
    with pytest.raises(AdapterError, match=f"; {name} is of the head that drafts"):
        layout.place(PeftFolder.read(folder))


def test_missing_targets_name_the_setting(tmp_path: Path) -> None:
    fields = {"family": "deepseek_v3", "num_kv_heads": None}
    folder = make_adapter(tmp_path / "a", {"model.layers.0.mlp.gate_proj": (96, 64)})
    with pytest.raises(AdapterError, match=r"; add mlp to lora.targets$"):
        stage(tmp_path, folder, LoraConfig(max_loras=1, targets=["attention"]), **fields)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers_are_refused(
    tmp_path: Path, value: str, dtype: torch.dtype
) -> None:
    folder = make_adapter(tmp_path / "a", MODULES)
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    stage(tmp_path, folder)
    list(tensors.values())[1][-1, 1] = float(value)
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="holds NaN or infinite values"):
        stage(tmp_path, folder)


def test_other_dtypes_and_unaligned_tensors(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", MODULES)
    file = folder / "adapter_model.safetensors"
    tensors, expected = load_file(file), stage(tmp_path, folder)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "  # the library aligns the tensors, the format does not
    file.write_bytes((length + 1).to_bytes(8, "little") + header + content[8 + length :])
    assert torch.equal(stage(tmp_path, folder), expected)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(AdapterError, match=f"not supported: {name} I8; expected F32, BF16"):
        PeftFolder.read(folder)


def test_adapters_of_the_start_are_read_side_by_side(tmp_path: Path) -> None:
    """Each read waits until two run; what one of them cannot read is in `errors`."""
    adapters = [LoadedAdapter(id=n, name=f"{n}", path=str(tmp_path / f"{n}")) for n in range(2)]
    make_adapter(adapters[0].folder, MODULES)
    make_adapter(adapters[1].folder, {"model.layers.0.mlp.gate": (8, 64)})
    path = small_checkpoint(tmp_path / "model", weights=False)
    layout = AdapterLayout.of(load_model_config(path), LoraConfig(max_loras=1))
    both = Barrier(2, timeout=60)

    class Pools(AdapterPools):
        def stage(self, folder: PeftFolder) -> torch.Tensor:
            both.wait()
            return super().stage(folder)

    store = AdapterStore(Pools(layout, 1, device=CPU, dtype=torch.float32))
    store.agree(adapters, gather=None)
    assert 0 in store and 1 not in store
    assert list(store.errors) == [1] and store.errors[1].startswith("no place for")
