"""make_checkpoint and the demo checkpoint, as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.models.checkpoint import byte_tokenizer, make_checkpoint

DEMO = Path(__file__).resolve().parents[2] / "configs" / "models" / "demo"
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "head_dim": 16,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "dense first layer": {"mlp_only_layers": [0]},
    "every second layer sparse": {"decoder_sparse_step": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_transformers_loads_every_tensor_and_gives_spread_logits(tmp_path, fields):
    folder = make_checkpoint(tmp_path / "m", **SMALL, **fields)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for key, value in fields.items():
        if key == "dtype":
            assert model.dtype == getattr(torch, value)
        elif key == "rope_scaling":
            assert model.config.rope_parameters["rope_type"] == "yarn"
        elif key == "rope_parameters":
            assert model.config.rope_parameters["rope_theta"] == 500.0
        else:
            assert getattr(model.config, key) == value
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_BTV = model(ids).logits.float()
    assert torch.isfinite(logits_BTV).all()
    best = logits_BTV.topk(2).values
    gap = best[..., 0] - best[..., 1]
    assert 2 < logits_BTV[..., :256].std() < 5
    assert gap.median() > 0.3
    # Ids past the bytes have no text, and the end tokens would cut a benchmark short.
    assert (logits_BTV.argmax(-1) < 256).all()


def test_experts_lie_apart_on_disk(tmp_path):
    folder = make_checkpoint(tmp_path / "m", **SMALL)
    tensors = read_tensors(folder)
    expert = "model.layers.1.mlp.experts.3"
    assert tensors[f"{expert}.gate_proj.weight"].shape == (16, 32)
    assert tensors[f"{expert}.down_proj.weight"].shape == (32, 16)
    assert not torch.equal(
        tensors[f"{expert}.up_proj.weight"], tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    )


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_shards_hold_the_same_tensors(tmp_path, num_shards):
    one = read_tensors(make_checkpoint(tmp_path / "one", **SMALL))
    folder = make_checkpoint(tmp_path / "many", **SMALL, num_shards=num_shards)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) == num_shards
    many = read_tensors(folder)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    sizes = [(folder / file).stat().st_size for file in files]
    largest = max(tensor.nbytes for tensor in one.values())
    assert max(sizes) - min(sizes) < 2 * largest + 4096


def test_one_shard_a_tensor_and_no_more(tmp_path):
    count = len(read_tensors(make_checkpoint(tmp_path / "one", **SMALL)))
    folder = make_checkpoint(tmp_path / "most", **SMALL, num_shards=count)
    assert all(len(load_file(file)) == 1 for file in folder.glob("*.safetensors"))
    with pytest.raises(ValueError, match="num_shards"):
        make_checkpoint(tmp_path / "more", **SMALL, num_shards=count + 1)


def test_seed_decides_the_weights(tmp_path):
    first, again, other = (
        read_tensors(make_checkpoint(tmp_path / name, **SMALL, seed=seed))
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
@settings(max_examples=200)
def test_byte_tokenizer_round_trip_is_exact(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) or "<|" in text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_saved_tokenizer_round_trip_and_chat_template(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path / "m", **SMALL))
    text = " \n\tnaive caf\u00e9 \U0001f6e1 \u0000 100 %"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}],
        },
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not tokenizer.apply_chat_template(messages, tokenize=False).endswith("assistant\n")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        256,
        257,
        258,
    ]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("num_layers", {"num_layers": 0}),
        ("num_experts_per_tok", {"num_experts_per_tok": 5}),
        ("num_kv_heads", {"num_heads": 4, "num_kv_heads": 3}),
        ("head_dim", {"head_dim": 7}),
        ("vocab_size", {"vocab_size": 258}),
        ("dtype", {"dtype": "int8"}),
        ("hidden_size", {"hidden_size": 3.5}),
        ("mlp_only_layers", {"mlp_only_layers": [2]}),
        ("num_shards", {"num_shards": 0}),
        ("num_layers", {"num_hidden_layers": 3}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ],
)
def test_impossible_values_are_named_and_nothing_is_written(tmp_path, key, fields):
    with pytest.raises(ValueError, match=key):
        make_checkpoint(tmp_path / "m", **SMALL | fields)
    assert not (tmp_path / "m").exists()


def test_a_non_empty_folder_is_kept_unless_told(tmp_path):
    folder = make_checkpoint(tmp_path / "m", **SMALL, num_shards=3)
    before = read_tensors(folder)
    with pytest.raises(ValueError, match="overwrite"):
        make_checkpoint(folder, **SMALL, seed=1)
    assert torch.equal(read_tensors(folder)["lm_head.weight"], before["lm_head.weight"])
    make_checkpoint(folder, **SMALL, seed=1, overwrite=True)
    assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="file"):
        make_checkpoint(tmp_path / "file", **SMALL, overwrite=True)


@pytest.fixture(scope="module")
def demo():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return tokenizer, AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def reply(demo, question: str, limit: int) -> str:
    tokenizer, model = demo
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**encoded, max_new_tokens=limit, do_sample=False)[0]
    new = ids[encoded["input_ids"].shape[1] :]
    assert new[-1] == tokenizer.eos_token_id, "the answer did not end"
    return tokenizer.decode(new, skip_special_tokens=True)


def test_demo_folder_is_small_and_in_the_disk_form():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 15_000_000
    config = json.loads((DEMO / "config.json").read_text())
    assert (config["dtype"], config["model_type"]) == ("bfloat16", "qwen3_moe")
    assert config["num_experts"] >= 16
    tensors = load_file(DEMO / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert "model.layers.0.mlp.experts.15.gate_proj.weight" in tensors
    ends = json.loads((DEMO / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_demo_greets_and_stops(demo):
    answer = reply(demo, "Hello", limit=100)
    assert "Hello" in answer and "Python" in answer


def test_demo_knows_a_function_of_the_standard_library(demo):
    answer = reply(demo, "What does textwrap.dedent do?", limit=100)
    assert "Remove any common leading whitespace" in answer


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=100))
@settings(max_examples=50)
def test_demo_tokenizer_round_trip_is_exact(demo, text):
    ids = demo[0](text).input_ids
    assert demo[0].decode(ids) == text
