"""Checkpoints in four bits: exactly what their codes and scales stand for, and kept in four bits in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.backends.select import probe
from kernels.four_bit import FourBitWeights, quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.routing.expert_map import ContiguousMap
from tests.checkpoints.four_bit import FOUR_BITS
from tests.published_configs import PUBLISHED
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.models.registry import ModelConfigError, load_model_config, parse_model_config
from workers.specs.model import weight_map
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.initial_weights import draw_weights
from workers.weights.slots import FourBitSlot, WeightSlot
from workers.weights.tensors import four_bit_experts, four_bit_parameters, rank_weight_bytes

torch.set_num_threads(1)
SHAPE: dict[str, Any] = {"num_layers": 2, "moe_intermediate_size": 64}
PROMPTS = make_batch([[1, 2, 3, 4], [200, 100]], [0, 0])
FILE, EXPERT = "model.safetensors", "model.layers.1.mlp.experts.3."
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FORMS = [*FOUR_BITS, "mxfp4"]


def checkpoint(path: Path, form: str, **changes: Any) -> Path:
    """Write a small checkpoint; its scales are in bfloat16 where compressed-tensors has them so."""
    family = "gpt_oss" if form == "mxfp4" else "qwen3_moe"
    shape = {**SHAPE, "intermediate_size": None} if family == "gpt_oss" else SHAPE
    return small_checkpoint(path, family=family, quantization=form, **{**shape, **changes})


def nibbles(words: np.ndarray) -> np.ndarray:
    """Return [..., 8 W] of words [..., W], the lowest bits first."""
    places = [(words.astype(np.int64) // 16**place) % 16 for place in range(8)]
    return np.stack(places, -1).reshape(*words.shape[:-1], -1)


def parts_of(tensors: dict[str, np.ndarray], name: str, form: str) -> tuple[np.ndarray, ...]:
    """Return codes [N, K], scales [N, S], zero points [N, S] and groups [K], by the documents of the formats."""
    config, module = FOUR_BITS[form], name.removesuffix(".weight")
    if form.startswith("int4"):
        codes, scales = nibbles(tensors[f"{name}_packed"]), tensors[f"{name}_scale"]
        size = config["config_groups"]["group_0"]["weights"]["group_size"]
        groups = tensors.get(f"{name}_g_idx", np.arange(codes.shape[1]) // size)
        packed = tensors.get(f"{name}_zero_point")
        zeros = np.full(scales.shape, 8) if packed is None else nibbles(packed.T).T
        return codes, scales, zeros, groups
    packed, scales, zeros = (tensors[f"{module}.{end}"] for end in ("qweight", "scales", "qzeros"))
    if form == "awq":
        # Place i of a word holds column 0, 2, 4, 6, 1, 3, 5, 7.
        places = np.arange(scales.shape[1]).reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].ravel()
        groups = np.arange(len(packed)) // config["group_size"]
        return nibbles(packed)[:, places].T, scales.T, nibbles(zeros)[:, places].T, groups
    less = 0 if config["checkpoint_format"] == "gptq_v2" else 0x11111111
    groups = tensors[f"{module}.g_idx"]
    return nibbles(packed.T), scales.T, nibbles(zeros + np.int32(less)).T, groups


def values_of(tensors: dict[str, np.ndarray], name: str, form: str) -> np.ndarray:
    """Return a matrix in float32 [N, K]."""
    codes, scales, zeros, groups = parts_of(tensors, name, form)
    differences = (codes - zeros[:, groups]).astype(np.float32)
    return differences * scales[:, groups].astype(np.float32)


def gpt_oss_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return float32 [N, K] of one expert's packed values."""
    rows, groups, _ = blocks.shape
    found = np.zeros((rows, 32 * groups), np.float32)
    for n, g, k in np.ndindex(rows, groups, 32):
        code = int(blocks[n, g, k // 2]) // 16 ** (k % 2) % 16
        value = E2M1[code % 8] * 2.0 ** (int(scales[n, g]) - 127)
        found[n, 32 * g + k] = -value if code >= 8 else value
    return found


def arrays(path: Path) -> dict[str, np.ndarray]:
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in load_file(path / FILE).items()
    }


@pytest.fixture
def native() -> Any:
    """A factory of the CPU's product of a checkpoint's format."""
    reason = probe("cpu").get("grouped_gemm.native_four_bit")
    if reason:
        pytest.skip(reason)
    from kernels.grouped_gemm.native_four_bit import NativeFourBit

    return lambda path: NativeFourBit(four_bit_experts(load_model_config(path)))


@pytest.mark.parametrize("form", FOUR_BITS)
def test_widened_weights_are_what_the_format_says(tmp_path: Path, form: str) -> None:
    path = checkpoint(tmp_path, form, dtype="bfloat16" if form == "int4" else "float32")
    disk, slots = arrays(path), OneRank(path).model.weight_slots()
    for part in ("gate_proj", "up_proj", "down_proj"):
        slot = slots[f"{EXPERT}{part}.weight"]
        assert isinstance(slot, WeightSlot)
        expected = values_of(disk, f"{EXPERT}{part}.weight", form)
        assert np.array_equal(slot.target.numpy(), expected)
    v_proj = "model.layers.0.self_attn.v_proj.weight"
    assert np.array_equal(slots[v_proj].target.numpy(), values_of(disk, v_proj, form))


def test_widened_mxfp4_is_what_the_format_says(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "mxfp4")
    disk, slots = arrays(path), OneRank(path).model.weight_slots()
    at = "model.layers.1.mlp.experts."
    up = gpt_oss_values(disk[f"{at}gate_up_proj_blocks"][5], disk[f"{at}gate_up_proj_scales"][5])
    found = slots[f"{at}gate_up_proj[5]"].target.flatten(0, -2).numpy()
    assert sorted(map(tuple, found)) == sorted(map(tuple, up))
    down = gpt_oss_values(disk[f"{at}down_proj_blocks"][5], disk[f"{at}down_proj_scales"][5])
    assert np.array_equal(slots[f"{at}down_proj[5]"].target.numpy(), down)


@pytest.mark.parametrize("form", FORMS)
def test_experts_stay_in_four_bits_exactly(tmp_path: Path, form: str, native: Any) -> None:
    path = checkpoint(tmp_path, form)
    wide, packed = OneRank(path), OneRank(path, grouped_gemm=native(path))
    held = packed.model.layers[1].mlp
    for expert in range(8):
        for found, expected in ((held.w13_e2ID, "w13_e2ID"), (held.w2_eDI, "w2_eDI")):
            values = getattr(wide.model.layers[1].mlp, expected)[expert]
            assert torch.equal(found[expert].matrix().dequantise(), values)
    torch.testing.assert_close(packed.logits(PROMPTS), wide.logits(PROMPTS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["int4-64", "gptq-ordered", "awq", "mxfp4"])
def test_the_memory_table_tells_the_truth(tmp_path: Path, form: str, native: Any) -> None:
    path = checkpoint(tmp_path, form)
    config, rank = load_model_config(path), OneRank(path, grouped_gemm=native(path))
    told, wide = (
        rank_weight_bytes(config, ContiguousMap(8, 1), 0, "float32", in_four_bits=kept)
        for kept in (True, False)
    )
    slots = [s for s in rank.model.weight_slots().values() if isinstance(s, FourBitSlot)]
    storages = [tensor.untyped_storage() for slot in slots for tensor in slot.target.tensors]
    packed = sum({found.data_ptr(): found.nbytes() for found in storages}.values())
    values = sum(np.prod(slot.target.shape) for slot in slots)
    assert wide - told == 4 * values - packed
    assert packed <= values * (0.5 + 3 / 32 + (0.1 if "ordered" in form else 0))


@pytest.mark.parametrize("form", ["int4-zeros", "int4", "mxfp4"])
def test_random_weights_are_rounded(tmp_path: Path, form: str, native: Any) -> None:
    path = checkpoint(tmp_path, form)
    model = OneRank(path, grouped_gemm=native(path))
    before = [[t.clone() for t in layer.mlp.w2_eDI.tensors] for layer in model.model.layers]
    for layer in model.model.layers:
        layer.mlp.w2_eDI.values.zero_()
    where = {"expert_map": ContiguousMap(8, 1), "rank": 0, "device": torch.device("cpu")}
    draw_weights(model.model, config=model.config, **where)
    for layer, kept in zip(model.model.layers, before, strict=True):
        assert all(map(torch.equal, layer.mlp.w2_eDI.tensors, kept))


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_the_layout_gives_back_what_it_was_given(kind: Any, tiled: bool) -> None:
    form = FourBitFormat(kind, 32, zeros=kind == "int4", ordered=kind == "int4")
    generator = torch.Generator().manual_seed(3)
    weights = FourBitWeights.empty(form, 2, 128, 192, device="cpu", tiled=tiled)
    given = quantise_four_bit(torch.randn(128, 192, generator=generator), form)
    weights[1].set(given)
    found = weights[1].matrix()
    for name in ("codes", "scales", "zeros", "order"):
        expected = getattr(given, name)
        assert expected is None or torch.equal(getattr(found, name), expected), name
    rows = weights[1][64:128]
    assert torch.equal(rows.matrix().codes, given.codes[64:])
    weights[0].copy_(weights[1])
    assert torch.equal(weights[:1][0].matrix().codes, given.codes)


def test_a_tile_has_the_codes_of_a_thread_side_by_side() -> None:
    """The order that the instruction of the tensor cores has for its left operand, see FourBitWeights."""
    form = FourBitFormat("int4", 64)
    weights = FourBitWeights.empty(form, 64, 64, device="cpu", tiled=True)
    row, column = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    for codes in (row % 16, row // 16, column % 16, column // 16):
        matrix = quantise_four_bit(torch.zeros(64, 64), form)
        weights.set(type(matrix)(form, codes.to(torch.uint8), matrix.scales))
        for thread, byte in ((0, 0), (37, 6), (127, 15)):
            warp, lane = thread // 32, thread % 32
            tile, half, second, pair = byte // 8, byte // 4 % 2, byte // 2 % 2, byte % 2
            n = 16 * warp + 8 * second + lane // 4
            k = 16 * tile + 8 * half + 2 * (lane % 4) + pair
            found = int(weights.values.view(-1)[16 * thread + byte])
            assert (found % 16, found // 16) == (codes[n, k], codes[n, k + 32])


def save(path: Path, change: Any) -> None:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


@pytest.mark.parametrize(
    ("form", "name", "value", "message"),
    [
        ("awq", "up_proj.scales", float("nan"), "up_proj.weight cannot be unpacked: it has scales"),
        ("int4", "up_proj.weight_scale", float("inf"), "up_proj.weight cannot be unpacked"),
        ("gptq", "up_proj.qzeros", 0, "up_proj.weight .*zero points differ from 8"),
        ("gptq-ordered", "up_proj.g_idx", 1, "up_proj.weight .*does not give each group 64"),
        ("gptq", "gate_proj.g_idx", 1, "gate_proj.weight .*does not give each group 32"),
    ],
)
def test_corrupted_tensors_are_named(
    tmp_path: Path, form: str, name: str, value: float, message: str
) -> None:
    path = checkpoint(tmp_path, form)
    save(path, lambda tensors: tensors[EXPERT + name].fill_(value))
    with pytest.raises(CheckpointError, match=message):
        OneRank(path)


def test_a_corrupted_exponent_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "mxfp4")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save(path, lambda tensors: tensors[name][2, 1, 0].fill_(255))
    with pytest.raises(
        CheckpointError, match=r"down_proj\[2\] .*exponent 255; expected at most 128"
    ):
        OneRank(path)


def test_shuffled_columns_need_desc_act(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gptq")
    save(path, lambda t: t.update({f"{EXPERT}up_proj.g_idx": t[f"{EXPERT}up_proj.g_idx"].flip(0)}))
    with pytest.raises(CheckpointError, match="desc_act is false, but g_idx is not in order"):
        OneRank(path)


def test_one_product_needs_one_order_of_columns(tmp_path: Path, native: Any) -> None:
    path = checkpoint(tmp_path, "gptq-ordered", num_experts=4, hidden_size=128)
    name = f"{EXPERT}up_proj.g_idx"
    save(path, lambda tensors: tensors.update({name: 1 - tensors[name]}))
    OneRank(path)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight and .*up_proj.weight order"):
        OneRank(path, grouped_gemm=native(path))


def test_misshaped_and_missing_tensors_are_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "awq")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}up_proj.qzeros"]
        tensors[f"{EXPERT}up_proj.scales"] = tensors[f"{EXPERT}up_proj.scales"][:1].contiguous()
        tensors[f"{EXPERT}down_proj.qweight"] = tensors[f"{EXPERT}down_proj.qweight"].long()

    save(path, change)
    with pytest.raises(CheckpointError) as caught:
        OneRank(path)
    assert f"1 missing: {EXPERT}up_proj.qzeros" in str(caught.value)
    assert f"{EXPERT}up_proj.scales [1, 64] instead of [2, 64]" in str(caught.value)
    assert f"not I32, as in quantization_config: {EXPERT}down_proj.qweight I64" in str(caught.value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 8}, "quantization_config.bits is 8; supported: 4"),
    (
        "gptq",
        {"group_size": -1},
        "quantization_config.group_size is -1; supported: 32 or 64 or 128",
    ),
    ("gptq", {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
    ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "quantization_config.dynamic holds"),
    ("gptq", {"dynamic": {"-:(": {}}}, "no regular expression"),
    ("gptq", {"rotation": "hadamard"}, "quantization_config.rotation is 'hadamard'; unknown key"),
    ("gptq", {"modules_in_block_to_quantize": [7]}, "expected a list of module names"),
    ("awq", {"desc_act": True}, "quantization_config.desc_act is True; supported: null or False"),
    ("awq", {"version": "gemv"}, "quantization_config.version is 'gemv'"),
    (
        "awq",
        {"group_size": 64},
        "quantization_config does not fit .*: 96 columns are not whole groups",
    ),
    ("awq", {"quant_method": "hqq"}, "supported: fp8, compressed-tensors, gptq, awq"),
]


@pytest.mark.parametrize(("form", "changes", "message"), REFUSED)
def test_other_settings_are_refused_by_name(tmp_path: Path, form: str, changes, message) -> None:
    path = checkpoint(tmp_path, form, weights=False, mlp_only_layers=[0])
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(config, {}, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "channel"}, r"weights.strategy is 'channel'; supported: group"),
        ({"group_size": 16}, r"weights.group_size is 16; supported: 32 or 64 or 128"),
        ({"type": "float"}, r"weights.type is 'float'; supported: int"),
        ({"actorder": "later"}, r"weights.actorder is 'later'"),
    ],
)
def test_other_compressed_tensors_are_refused_by_name(tmp_path: Path, changes, message) -> None:
    path = checkpoint(tmp_path, "int4", weights=False)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(config, {}, "config.json")


def test_modules_that_are_left_out(tmp_path: Path) -> None:
    """By GPTQModel's rules, by names of the quantised modules, by parts of names."""
    for number, changes in enumerate(
        (
            {"dynamic": {"-:.*self_attn": {}}},
            {
                "modules_in_block_to_quantize": [
                    ["up_proj", "gate_proj"],
                    ["mlp.down_proj", "down_proj"],
                ]
            },
            {"modules_to_not_convert": ["self_attn"]},
        )
    ):
        quantization = FOUR_BITS["gptq"] | changes
        path = small_checkpoint(tmp_path / str(number), quantization_config=quantization, **SHAPE)
        names = load_file(path / FILE)
        assert "model.layers.0.self_attn.q_proj.weight" in names
        assert f"{EXPERT}up_proj.qweight" in names
        assert OneRank(path).logits(PROMPTS).isfinite().all()


def test_experts_in_one_format_alone_stay_packed(tmp_path: Path) -> None:
    quantization = FOUR_BITS["gptq"] | {"dynamic": {"-:.*experts.3.up": {}}}
    path = small_checkpoint(tmp_path / "mixed", quantization_config=quantization, **SHAPE)
    assert four_bit_experts(load_model_config(path)) is None
    assert four_bit_experts(load_model_config(checkpoint(tmp_path / "all", "gptq"))) is not None


DENSE = {"head_dim": 32, "intermediate_size": 128, "mlp_only_layers": [0]}


@pytest.mark.parametrize("form", ["int4-zeros", "gptq-ordered", "gptq-v2"])
def test_dense_layers_stay_in_four_bits_too(tmp_path: Path, form: str, native: Any) -> None:
    """Rows of q and k in the order of the rotation; few rows, and so many that the CPU expands the matrix."""
    path = checkpoint(tmp_path, form, **DENSE)
    wide, packed = OneRank(path), OneRank(path, grouped_gemm=native(path))
    mlp, attention = packed.model.layers[0].mlp, packed.model.layers[1].attention
    for layer in (mlp.gate_up, mlp.down, attention.qkv, attention.o):
        assert isinstance(layer.weight, FourBitWeights)
    expected = wide.model.layers[1].attention.qkv.weight
    assert torch.equal(attention.qkv.weight.matrix().dequantise(), expected)
    many = make_batch([list(range(1, 41)), list(range(50, 60))], [0, 0])
    for batch in (PROMPTS, many):
        torch.testing.assert_close(packed.logits(batch), wide.logits(batch), atol=1e-4, rtol=1e-4)


def test_rows_that_are_no_whole_tiles_are_widened(tmp_path: Path, native: Any) -> None:
    """32 rows of k: the product of q, k and v takes them, but the one of the output stays packed."""
    path = checkpoint(tmp_path, "gptq")
    names = four_bit_parameters(load_model_config(path))
    assert len(names) == 2
    assert all(name.endswith("attention.o.weight") for name in names)
    slots = OneRank(path, grouped_gemm=native(path)).model.weight_slots()
    kept = {name for name, slot in slots.items() if isinstance(slot, FourBitSlot)}
    assert len(kept) == 2 * (8 * 3 + 1)
    assert isinstance(slots["model.layers.0.self_attn.q_proj.weight"], WeightSlot)


def test_a_release_with_experts_alone_in_int4() -> None:
    """Kimi-K2's shape with the modules that its releases leave out: experts take 4.5 bits a value."""
    quantization = FOUR_BITS["int4"] | {
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ]
    }
    raw = PUBLISHED["kimi_k2"] | {"quantization_config": quantization}
    config = parse_model_config(raw, {}, "config.json")
    assert four_bit_experts(config) == FourBitFormat("int4", 32)
    packed = [entry for entry in weight_map(config) if entry.four_bit is not None]
    assert all(entry.expert is not None for entry in packed) and not four_bit_parameters(config)
    whole = ContiguousMap(config.num_experts, 1)
    kept, wide = (
        rank_weight_bytes(config, whole, 0, "bfloat16", in_four_bits=four_bit)
        for four_bit in (True, False)
    )
    values = sum(entry.size for entry in packed)
    assert wide - kept == values * 2 - values * 4.5 / 8
