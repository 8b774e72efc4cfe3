"""make_checkpoint and the demo checkpoint, as transformers reads them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.byte_tokenizer import byte_tokenizer
from scripts.make_checkpoint import main, make_checkpoint
from tests.unit.model_case import OneRank, make_batch
from workers.models.registry import FAMILIES, load_model_config

DEMO = Path(__file__).resolve().parents[2] / "configs" / "models" / "demo"
FAMILIES_WRITTEN = sorted(
    FAMILIES.keys() - {"glm4v_moe", "kimi_k2", "qwen3_5_moe", "qwen3_vl_moe"}
)  # in transformers, without images


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES_WRITTEN)
def test_a_rank_and_transformers_read_the_checkpoint_alike(tmp_path, family):
    folder = make_checkpoint(tmp_path / "m", family=family, hidden_size=64)
    config = load_model_config(folder)
    assert (config.model_type, config.num_layers, config.num_experts) == (family, 4, 16)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_TV = model(ids).logits[0]
    # Ids past the bytes have no text, and the end tokens would cut a benchmark short.
    assert (expected_TV.argmax(-1) < 256).all()
    found_TV = OneRank(folder).logits(make_batch(ids.tolist(), [0]))
    torch.testing.assert_close(found_TV, expected_TV, atol=1e-4, rtol=0)


def test_the_command(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["make_checkpoint", *map(str, arguments)])
        main()

    folder = tmp_path / "new"
    fields = ("num_hidden_layers=2", "hidden_size=48", "num_experts=6", "dtype=bfloat16")
    run(folder, *(part for field in fields for part in ("--set", field)))
    config = load_model_config(folder)
    assert (config.num_layers, config.hidden_size, config.num_experts) == (2, 48, 6)
    assert config.dtype == "bfloat16"
    with pytest.raises(SystemExit):
        run(folder)
    assert "--overwrite" in capsys.readouterr().err
    run(folder, "--overwrite", "--no-weights")
    assert not list(folder.glob("*.safetensors"))
    for wrong, said in (
        (("--set", "num_experts=2"), "num_experts_per_tok"),
        (("--family", "llama"), "qwen3_moe"),
        (("--family", "kimi_k2"), "glm4_moe_lite, glm4v_moe, granitemoe"),
    ):
        with pytest.raises(SystemExit):
            run(tmp_path / "other", *wrong)
        assert said in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_seed_decides_the_weights(tmp_path):
    first, again, other = (
        load_file(make_checkpoint(tmp_path / name, seed=seed) / "model.safetensors")[
            "lm_head.weight"
        ]
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
@settings(max_examples=200)
def test_byte_tokenizer_round_trip_is_exact(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) or "<|" in text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_saved_tokenizer_round_trip_and_chat_template(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path / "m"))
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


def test_overwriting_leaves_no_weights_of_before(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="overwrite"):
        make_checkpoint(folder)
    make_checkpoint(folder, overwrite=True)
    assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]


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
