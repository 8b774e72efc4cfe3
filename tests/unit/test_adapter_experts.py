"""Adapters of routed experts in a slot: which matrices each expert gets, and what is refused with which message."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapter_case import make_adapter, make_fused_adapter
from tests.unit.model_case import SMALL, small_checkpoint
from tests.unit.test_adapter_folder import CPU, MODULES, Q, stage
from workers.adapters.layout import AdapterLayout
from workers.adapters.peft_folder import PeftFolder
from workers.adapters.pools import AdapterPools
from workers.adapters.staging import expert_views
from workers.lora_config import AdapterError, LoraConfig
from workers.models.registry import load_model_config

EIGHT = {"moe_intermediate_size": 40}  # of SMALL's 8 experts
WITH_EXPERTS = LoraConfig(max_loras=1, targets=["attention", "experts"])
EXPERTS_0 = "model.layers.0.mlp.experts"


def update_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def add_tensors(folder: Path, part: str, other: str) -> None:
    """Add a copy of each tensor whose name has this part, under the name with another part."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    copies = {name.replace(part, other): it.clone() for name, it in tensors.items() if part in name}
    save_file(tensors | copies, file)


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("granitemoe", "block_sparse_moe.experts.down_proj, block_sparse_moe.experts.gate_up_proj"),
        ("gpt_oss", "mlp.experts.down_proj, mlp.experts.gate_up_proj"),
    ],
)
def test_products_of_experts_have_their_names_in_peft(
    tmp_path: Path, family: str, experts: str
) -> None:
    folder = make_adapter(tmp_path / "a", {"model.layers.0.mlp.norm": (64, 64)})
    lora = LoraConfig(max_loras=1, targets=["experts"])
    with pytest.raises(AdapterError, match=f"no place for .*; adapters may change {experts}$"):
        stage(tmp_path, folder, lora, family=family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [3, 16])
def test_each_expert_of_a_rank_gets_its_own_matrices(
    tmp_path: Path, rank: int, dtype: torch.dtype
) -> None:
    """Of experts that wrap around, some of which have no adapter, or one of another rank, or another factor."""
    experts = (2, 3, 0, 1)
    path = small_checkpoint(tmp_path / "model", weights=False)
    modules = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}": shape
        for layer in (0, 1)
        for expert in range(SMALL["num_experts"])
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32)))
        if (layer, expert, name) != (1, 3, "up_proj")
    }
    alphas = {r"layers.0.mlp.experts.3.*": 2.5}
    folder = make_adapter(tmp_path / "a", modules, rank=rank, alpha_pattern=alphas)
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    lora = LoraConfig(max_loras=1, targets=["experts"])
    layout = AdapterLayout.of(load_model_config(path), lora, experts)
    read = PeftFolder.read(folder)
    staged = AdapterPools(layout, 1, device=CPU, dtype=torch.bfloat16).stage(read)[None]
    assert {it.block.split(".")[1] for it in layout.experts.products} == {"0", "1", "2"}
    for product in layout.experts.products:
        a_SeQK, b_SeNr = expert_views(staged, product, 16)
        names = ("gate_proj", "up_proj") if product.num_parts == 2 else ("down_proj",)
        expected_a, expected_b = torch.zeros_like(a_SeQK[0]), torch.zeros_like(b_SeNr[0])
        for place, expert in enumerate(experts):
            for (start, end, part), name in zip(product.blocks, names, strict=True):
                block = product.block.removesuffix(".experts")
                module = f"model.{block}.experts.{expert}.{name}"
                if (pair := read.pairs.get(module)) is None:
                    continue
                expected_a[place, 16 * part : 16 * part + rank] = tensors[pair.a]
                scaled = tensors[pair.b].float() * read.config.declared(module).factor
                expected_b[place, start:end, :rank] = scaled
        assert torch.equal(a_SeQK[0], expected_a) and torch.equal(b_SeNr[0], expected_b)
        assert expected_b.any() == (".2." not in product.block)


@pytest.mark.parametrize("swapped", [False, True])
def test_fused_matrices_follow_the_experts_of_the_rank(tmp_path: Path, swapped: bool) -> None:
    experts = [6, 7, 0, 1, 4]
    path = small_checkpoint(tmp_path / "model", weights=False, moe_intermediate_size=40)
    layers = {"model.layers.1.mlp.experts": (8, 40, 64)}
    folder = PeftFolder.read(make_fused_adapter(tmp_path / "a", layers, swapped=swapped))
    lora, found = LoraConfig(max_loras=1, targets=["experts"]), []
    for own in (range(8), experts):
        layout = AdapterLayout.of(load_model_config(path), lora, own)
        staged = AdapterPools(layout, 1, device=CPU, dtype=torch.float32).stage(folder)[None]
        found.append([expert_views(staged, it, 16) for it in layout.experts.products])
    for every, mine in zip(*found, strict=True):
        for every_Se, mine_Se in zip(every, mine, strict=True):
            assert torch.equal(every_Se[:, experts], mine_Se)
    assert any(matrices.any() for product in found[1] for matrices in product)


@pytest.mark.parametrize("experts", [4, 16])
def test_fused_adapters_of_another_number_of_experts_are_refused(
    tmp_path: Path, experts: int
) -> None:
    folder = make_fused_adapter(tmp_path / "a", {EXPERTS_0: (experts, 40, 64)}, swapped=False)
    message = (
        f"^{EXPERTS_0}.gate_up_proj: lora_A has {2 * experts} rows, adapter_config.json has rank 2 "
        r"\(r, rank_pattern\) for each of the model's 8 experts: the files are of two adapters, or of another model$"
    )
    with pytest.raises(AdapterError, match=message):
        stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)


def test_ranks_of_fused_parameters_are_those_of_the_configuration(tmp_path: Path) -> None:
    folder = make_fused_adapter(tmp_path / "a", {EXPERTS_0: (8, 40, 64)}, swapped=False, rank=4)
    stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)
    for change in ({"r": 8}, {"rank_pattern": {r".*\.experts\.down_proj": 2}}):
        update_config(folder, r=4, rank_pattern={})
        update_config(folder, **change)
        with pytest.raises(AdapterError, match=r"_proj: lora_A has 32 rows, .* has rank [28] \(r"):
            stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)
    update_config(folder, r=2, rank_pattern={r".*_proj": 4})
    stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)
    lora = WITH_EXPERTS.model_copy(update={"max_rank": 3})
    message = r"experts.gate_up_proj: rank 4 is above lora.max_rank \(3\); set lora.max_rank: 4$"
    with pytest.raises(AdapterError, match=message):
        stage(tmp_path, folder, lora, **EIGHT)


def test_fused_adapters_of_other_shapes_are_refused(tmp_path: Path) -> None:
    folder = make_fused_adapter(tmp_path / "a", {EXPERTS_0: (8, 24, 64)}, swapped=False)
    message = (
        "the adapter has 64 inputs and 48 outputs, the model's parameters "
        f"{EXPERTS_0}.gate_up_proj 64 and 80, {EXPERTS_0}.down_proj 40 and 64: it was made for an"
    )
    with pytest.raises(AdapterError, match=message):
        stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)


def test_square_matrices_alone_do_not_show_the_order_of_a_and_b(tmp_path: Path) -> None:
    folder = make_fused_adapter(tmp_path / "a", {EXPERTS_0: (8, 32, 64)}, swapped=False)
    stage(tmp_path, folder, WITH_EXPERTS)
    file = folder / "adapter_model.safetensors"
    save_file({name: it for name, it in load_file(file).items() if ".base_layer." in name}, file)
    message = rf"^{EXPERTS_0}.gate_up_proj: .* its 64 rows and columns nor .*; adapt gate_up_proj "
    with pytest.raises(AdapterError, match=message):
        stage(tmp_path, folder, WITH_EXPERTS)


def test_two_adapters_of_one_product_are_refused(tmp_path: Path) -> None:
    """Of a module under two names, of two orders of wrapping, and of an expert alone and with all others."""
    folder = make_adapter(tmp_path / "a", MODULES)
    add_tensors(folder, "base_model.model.model.", "base_model.model.")
    with pytest.raises(AdapterError, match=r"^layers\S+ and model.layers\S+ are adapters of one"):
        stage(tmp_path, folder)
    folder = make_adapter(tmp_path / "b", MODULES)
    add_tensors(folder, ".weight", ".default.weight")
    with pytest.raises(AdapterError, match=f"lora_A.*weight and .*weight are one matrix of {Q}"):
        stage(tmp_path, folder)
    fused = {EXPERTS_0: (8, 40, 64)}
    folder = make_fused_adapter(tmp_path / "c", fused, swapped=False, rank=4)
    add_tensors(folder, "experts.base_layer.lora", "experts.base_layer.base_layer.lora")
    with pytest.raises(AdapterError, match="are adapters of one product"):
        stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)
    folder = make_fused_adapter(tmp_path / "d", fused, swapped=False, rank=4)
    single = make_adapter(tmp_path / "e", {f"{EXPERTS_0}.3.up_proj": (40, 64)})
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | load_file(single / "adapter_model.safetensors"), file)
    with pytest.raises(AdapterError, match=r"experts\.3\.up_proj and .* are adapters of one"):
        stage(tmp_path, folder, WITH_EXPERTS, **EIGHT)


def test_the_expert_with_values_that_are_no_numbers_is_named(tmp_path: Path) -> None:
    modules = {f"model.layers.0.mlp.experts.{number}.up_proj": (32, 64) for number in range(4)}
    folder = make_adapter(tmp_path / "a", modules)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    wrong = "base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_B.weight"
    tensors[wrong][3, 1] = float("nan")
    save_file(tensors, file)
    path = small_checkpoint(tmp_path / "model", weights=False)
    lora = LoraConfig(max_loras=1, targets=["experts"])
    layout = AdapterLayout.of(load_model_config(path), lora, range(SMALL["num_experts"]))
    pools = AdapterPools(layout, 1, device=CPU, dtype=torch.float32)
    with pytest.raises(AdapterError, match=f": {wrong} holds NaN or infinite values"):
        pools.stage(PeftFolder.read(folder))
