"""The floors that served figures are compared with, against figures counted by hand."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scripts.bench.gpu_serving_report import kinds_table
from scripts.bench.released_shapes import model_folder
from scripts.bench.roofline import Hardware, floor_of, kind_floors, step_floor, step_floors
from scripts.bench.step_work import LayerKind, StepPart, StepShape, step_work
from tests.published_configs import PUBLISHED
from workers.models.registry import load_model_config, parse_model_config
from workers.specs.model import weight_map
from workers.specs.quantization import Fp8Quantization
from workers.specs.weight_map import Fp8Form, Scaling

QWEN3 = Path(__file__).parents[2] / "configs" / "models" / "qwen3-30b-a3b"
EXPERT = 3 * 2048 * 768
ATTENTION = 2048 * 128 * (32 + 4 + 4 + 32)
LAYERS = 48


@pytest.fixture(scope="module")
def model():
    return load_model_config(QWEN3)


def test_a_decode_step_reads_weights_and_cache(model) -> None:
    floor = floor_of(model, 4, in_flight=512, input_len=1024, output_len=1024)
    weights = 2 * (LAYERS * (32 * EXPERT + ATTENTION + 2048 * 128) + 151936 * 2048)
    cache = 128 * 1536 * LAYERS * 2 * 4 * 128 * 2
    assert floor.decode_step.memory_s == pytest.approx((weights + cache) / 4.0e12, rel=1e-3)
    assert floor.decode_step.floor_s == floor.decode_step.memory_s
    assert floor.decode_step.memory_s == pytest.approx(9.0e-3, rel=0.02)


def test_a_prompt_computes(model) -> None:
    floor = floor_of(model, 4, in_flight=256, input_len=4096, output_len=8)
    per_token = 2 * LAYERS * (ATTENTION + 8 * EXPERT + 2048 * 128 + 2 * 32 * 128 * 2048)
    assert floor.prefill.compute_s == pytest.approx(64 * 4096 * per_token / 750e12)
    assert floor.prefill.floor_s == floor.prefill.compute_s
    rows = 2.72 * 2 * LAYERS * 4096  # ranks reached beside the own, out and back
    assert floor.prefill.link_s == pytest.approx(64 * 4096 * rows / 380e9, rel=2e-3)
    assert 350_000 < floor.total_tokens_per_s < 450_000


def test_one_rank_sends_nothing_and_few_tokens_read_few_experts(model) -> None:
    one = floor_of(model, 1, in_flight=1, input_len=1, output_len=2).decode_step
    assert one.link_s == 0
    touched = 2 * (LAYERS * (8 * EXPERT + ATTENTION + 2048 * 128) + 151936 * 2048)
    assert one.memory_s == pytest.approx(touched / 4.0e12, rel=1e-3)


def test_experts_in_fp8_take_half_the_bytes_and_a_rate_of_their_own(model) -> None:
    load = {"in_flight": 512, "input_len": 1024, "output_len": 1024}
    plain, fp8 = (floor_of(model, 4, **load, fp8_experts=fp8) for fp8 in (False, True))
    saved = plain.decode_step.memory_s - fp8.decode_step.memory_s
    assert saved == pytest.approx(LAYERS * 32 * EXPERT / 4.0e12, rel=1e-3)
    flops = 128 * 1024 * LAYERS * 2 * 8 * EXPERT
    saved = plain.prefill.compute_s - fp8.prefill.compute_s
    assert saved == pytest.approx(flops / 750e12 - flops / 1300e12)


def test_dense_weights_and_rows_in_fp8_take_half_the_bytes(model) -> None:
    stored = Fp8Quantization(Fp8Form(Scaling.BLOCK, "_scale_inv"))
    shape = StepShape(tokens=8192, context=512, kv_reads=0, sampled=8, fp8=True)
    plain, fp8 = (
        step_work(found, 4, shape) for found in (model, replace(model, quantization=stored))
    )
    dense, dense_fp8 = plain[StepPart.DENSE], fp8[StepPart.DENSE]
    assert dense.memory_bytes - dense_fp8.memory_bytes == LAYERS * ATTENTION
    flops = 2 * 8192 * LAYERS * ATTENTION
    assert (dense.fp8_flops, dense_fp8.fp8_flops) == (0, flops)
    assert dense.flops - dense_fp8.flops == flops
    for work in (plain, fp8):
        there, back = work[StepPart.DISPATCH], work[StepPart.COMBINE]
        assert there.link_bytes == pytest.approx(back.link_bytes / 2 * (1 + 4 / 128))


def test_rates_follow_from_the_parts(model) -> None:
    load = {"in_flight": 128, "input_len": 128, "output_len": 512}
    floor = floor_of(model, 4, **load)
    seconds = floor.prefill.floor_s + 511 * floor.decode_step.floor_s
    assert floor.output_tokens_per_s == pytest.approx(128 * 512 / seconds)
    assert floor.total_tokens_per_s == pytest.approx(128 * 640 / seconds)
    twice = replace(Hardware(), memory_bytes=8.0e12)
    faster = floor_of(model, 4, **load, hardware=twice)
    assert faster.decode_step.memory_s == pytest.approx(floor.decode_step.memory_s / 2)


def test_an_h100_has_the_h200s_rates_but_for_its_memory() -> None:
    h200, h100 = (Hardware.of([f"NVIDIA {name}, 81559 MiB"]) for name in ("H200", "H100 80GB HBM3"))
    assert h200 == Hardware.of([]) == Hardware()
    assert replace(h100, memory_bytes=h200.memory_bytes) == h200
    assert h100.memory_bytes < h200.memory_bytes


def test_states_in_bfloat16_halve_what_a_decode_reads_and_writes() -> None:
    hybrid = parse_model_config(PUBLISHED["qwen3_5_moe"], {}, "config.json")
    shape = StepShape(tokens=0, context=1, kv_reads=0, sampled=3)
    moved = [
        step_work(hybrid, 1, replace(shape, states=states))[StepPart.LINEAR_ATTENTION].memory_bytes
        for states in (None, "float32", "bfloat16")
    ]
    conv = 3 * 8192 * 2
    assert moved == [2 * 3 * 30 * (state + conv) for state in (2**21, 2**21, 2**20)]
    load = {"in_flight": 128, "input_len": 1024, "output_len": 1024}
    wide, narrow = (
        floor_of(hybrid, 1, **load, states=states) for states in ("float32", "bfloat16")
    )
    assert narrow.decode_step.memory_s < wide.decode_step.memory_s
    assert narrow.prefill == wide.prefill


def test_a_cache_in_fp8_halves_what_a_decode_reads(model) -> None:
    shape = StepShape(tokens=0, context=1536, kv_reads=128 * 1536, sampled=0, fp8_cache=True)
    read = step_work(model, 4, shape)[StepPart.ATTENTION].memory_bytes
    # A byte for the scale of each head beside 128 values.
    assert read == 128 * 1536 * LAYERS * 2 * 4 * (128 + 1)
    load = {"in_flight": 512, "input_len": 1024, "output_len": 1024}
    wide, narrow = (floor_of(model, 4, **load, fp8_cache=fp8) for fp8 in (False, True))
    assert narrow.decode_step.memory_s < wide.decode_step.memory_s
    assert narrow.prefill == wide.prefill


def test_parts_of_a_decode_step(model) -> None:
    shape = StepShape(tokens=128, context=1536, kv_reads=128 * 1536, sampled=128)
    floors = step_floors(model, 4, shape)
    assert set(floors) == set(StepPart)
    queries_and_answers = LAYERS * 128 * (2 * 4096 + 2 * 512)
    cache = 128 * 1536 * LAYERS * 2 * 512
    memory = {
        StepPart.ATTENTION: cache + queries_and_answers,
        StepPart.GROUPED: LAYERS * (32 * EXPERT + 128 * 8 * 2 * (2048 + 768)),
        StepPart.NORMS: LAYERS * 2 * (4 * 128 * 2048 + 2048),
        StepPart.COPIES: 0,
        StepPart.VOTES: 0,
    }
    for part, values in memory.items():
        assert floors[part].memory_s == pytest.approx(2 * values / 4.0e12, rel=1e-4), part
    rows = 128 * LAYERS * 2.72 * 4096
    for part in (StepPart.DISPATCH, StepPart.COMBINE):
        assert floors[part].link_s == pytest.approx(rows / 380e9, rel=2e-3)
    logits = 2 * 128 * 2048 * 151936
    layers = 2 * 128 * LAYERS * (ATTENTION + 2048 * 128)
    assert floors[StepPart.DENSE].compute_s == pytest.approx((layers + logits) / 750e12)


def test_parts_take_no_less_than_their_step(model) -> None:
    shape = StepShape(tokens=8192, context=512, kv_reads=0, sampled=8)
    step, parts = step_floor(model, 4, shape), step_floors(model, 4, shape).values()
    assert step.compute_s == pytest.approx(sum(part.compute_s for part in parts))
    assert step.link_s == pytest.approx(sum(part.link_s for part in parts))
    assert step.memory_s < sum(part.memory_s for part in parts)
    assert step.floor_s < sum(part.floor_s for part in parts)


def test_a_head_that_is_the_embedding_is_read(model) -> None:
    shape = StepShape(tokens=1, context=1, kv_reads=1, sampled=1)
    tied = replace(model, tie_word_embeddings=True)
    assert step_floor(tied, 4, shape) == step_floor(model, 4, shape)


def test_layers_with_a_window_read_its_keys_alone(tmp_path: Path) -> None:
    model = load_model_config(model_folder("gpt-oss-120b", None, tmp_path))
    found = step_floors(
        model, 4, StepShape(tokens=32, context=1024, kv_reads=32 * 1024, sampled=32)
    )
    keys = 32 * 18 * (1024 + 128)
    attention = found[StepPart.ATTENTION]
    read = keys * 2 * 8 * 64 * 2 + 2 * 36 * 32 * (2 * 64 + 2 * 8) * 64
    assert attention.memory_s == pytest.approx(read / 4.0e12)
    assert attention.compute_s == pytest.approx(2 * keys * 2 * 64 * 64 / 750e12)


def test_kinds_of_layers_share_the_work_of_a_step(tmp_path: Path) -> None:
    model = load_model_config(model_folder("qwen3.6-35b-a3b", None, tmp_path))
    shape = StepShape(tokens=128, context=1536, kv_reads=128 * 1536, sampled=128)
    step, kinds = step_floor(model, 2, shape), kind_floors(model, 2, shape)
    for resource in ("memory_s", "compute_s", "link_s"):
        of_kinds = sum(getattr(kind, resource) for kind in kinds.values())
        assert of_kinds == pytest.approx(getattr(step, resource))
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert kinds[LayerKind.DELTA_NETS].memory_s == pytest.approx(2 * 128 * 30 * state / 4.0e12)
    cached = 128 * 1536 * 10 * 2 * 2 * 256 * 2
    assert kinds[LayerKind.FULL_ATTENTION].memory_s == pytest.approx(cached / 4.0e12, rel=1e-3)
    touched = 1 - (1 - 8 / 256) ** 256
    read = touched * 128 * 40 * 3 * 2048 * 512 * 2
    assert kinds[LayerKind.EXPERTS].memory_s == pytest.approx(read / 4.0e12)


def test_the_released_qwen3_is_the_committed_folder(tmp_path: Path) -> None:
    released = load_model_config(model_folder("qwen3-30b-a3b", None, tmp_path))
    committed = load_model_config(QWEN3)
    assert released.layers == committed.layers and released.moe == committed.moe
    assert released.vocab_size == committed.vocab_size


def test_released_shapes_of_delta_nets_have_the_published_formats(tmp_path: Path) -> None:
    """Gates, convolutions and the small projections a and b of a delta net are stored in 16 bits."""
    plain, model = (
        load_model_config(model_folder("qwen3.6-35b-a3b", 4, tmp_path, "fp8" if fp8 else None))
        for fp8 in (False, True)
    )
    stored = {entry.name: entry.fp8 is not None for entry in weight_map(model)}
    in_fp8 = {name.rsplit(".", 2)[1] for name, fp8 in stored.items() if fp8}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"}
    assert in_fp8 == attention | {"gate_proj", "up_proj", "down_proj"}
    assert not any(
        stored[name] for name in stored if name.endswith(("proj_a.weight", "proj_b.weight"))
    )
    shape = StepShape(tokens=8192, context=1024, kv_reads=0, sampled=1, fp8=True)
    works = [step_work(found, 1, shape)[StepPart.DENSE] for found in (plain, model)]
    gdn, full = 2048 * (8192 + 2 * 4096), 2048 * (3 * 4096 + 2 * 512)
    in_fp8_values = 3 * gdn + full + 4 * 3 * 2048 * 512
    assert works[0].memory_bytes - works[1].memory_bytes == in_fp8_values
    assert works[1].fp8_flops == 2 * 8192 * in_fp8_values
    values = 3 * (8192 + 2 * 4096 + 2 * 32) + 3 * 4096 + 2 * 512 + 2 * 4 * 2048 + 4 * (2048 + 256)
    assert works[1].activation_bytes == 2 * (8192 * values + 2048 + 248320)


def test_the_page_of_a_served_shape_names_the_floor_of_each_kind(tmp_path: Path) -> None:
    model = load_model_config(model_folder("qwen3.6-35b-a3b", None, tmp_path))
    load = {"in_flight": 256, "input_len": 1024, "output_len": 1024}
    floor = asdict(floor_of(model, 2, **load))
    _, _, row, _ = kinds_table([load | {"floor": floor}])
    step = [float(part) for part in row.split("|")[3].split("+")]
    memory = floor["decode_kinds"]["delta nets"]["memory_s"]
    assert len(step) == 4 and step[1] == pytest.approx(1e3 * memory, abs=0.01)
    del floor["decode_kinds"]
    assert kinds_table([load | {"floor": floor}]) == []


def test_four_bits_are_read_as_they_are_packed() -> None:
    """gpt-oss-120b: 36 layers of 128 experts, with a byte of scale for 32 values."""
    gpt_oss = parse_model_config(PUBLISHED["gpt_oss"], {}, "config.json")
    shape = StepShape(tokens=1e6, context=1, kv_reads=0, sampled=0)
    values = 36 * 128 * 3 * 2880 * 2880
    biases = 2 * 36 * 128 * 3 * 2880
    for four_bit, expected in ((False, 2 * values), (True, values / 2 + values / 32)):
        work = step_work(gpt_oss, 1, replace(shape, four_bit=four_bit))[StepPart.GROUPED]
        assert work.memory_bytes == pytest.approx(expected + biases, rel=1e-4)
        assert work.fp8_flops == 0 and work.flops > 0


def test_dense_layers_in_four_bits_are_read_so(model) -> None:
    raw = PUBLISHED["qwen3_moe"] | {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
        }
    }
    packed = parse_model_config(raw, {}, "config.json")
    shape = StepShape(tokens=1, context=1, kv_reads=0, sampled=0)
    wide, narrow = (
        step_work(packed, 1, replace(shape, four_bit=four_bit))[StepPart.DENSE].memory_bytes
        for four_bit in (False, True)
    )
    values = sum(e.size for e in weight_map(packed) if e.four_bit and e.expert is None)
    assert wide - narrow == pytest.approx(values * (2 - 0.5 - 2 / 128))
