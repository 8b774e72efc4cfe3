"""What a checkpoint's files and the YAML make of its prompts, and the wrong combinations."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model_case import small_checkpoint
from tests.unit.pooling_case import QWEN, add_modules, class_checkpoint
from workers.config import ModelSection
from workers.models.registry import ModelConfigError, configured_model, load_model_config
from workers.specs.model import ModelConfig, weight_map
from workers.specs.pooling import PoolingSpec

NO_WEIGHTS: dict[str, Any] = {"weights": False}


def configured(path: Path, **section: Any) -> ModelConfig:
    return configured_model(ModelSection(path=str(path), **section))


def spec_of(path: Path, **section: Any) -> PoolingSpec:
    spec = configured(path, **section).pooling
    assert spec is not None
    return spec


def names_of(config: ModelConfig) -> set[str]:
    return {entry.name for entry in weight_map(config)}


def test_a_generating_checkpoint_generates_unless_the_yaml_wants_vectors(tmp_path):
    path = small_checkpoint(tmp_path / "m", **NO_WEIGHTS)
    assert load_model_config(path).pooling is None
    config = configured(path, task="embed")
    assert config.pooling == PoolingSpec(task="embed", size=64)
    assert "lm_head.weight" not in names_of(config) and "lm_head." in config.skipped
    spec = spec_of(path, task="score", pooling={"type": "mean", "score_tokens": ["0", "1"]})
    assert spec.score_tokens == ("0", "1") and spec.rows == "mean" and spec.activation == "sigmoid"
    assert "lm_head.weight" in names_of(configured(path, task="score"))


@pytest.mark.parametrize("kind", ["Model", "TextModel"])
def test_a_base_model_embeds(tmp_path, kind):
    path = small_checkpoint(tmp_path / "m", architectures=[QWEN + kind], **NO_WEIGHTS)
    config = load_model_config(path)
    assert config.pooling == PoolingSpec(task="embed", size=64) and not config.has_logits


@pytest.mark.parametrize(
    ("pooling", "rows"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 64}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_the_files_of_sentence_transformers_are_read(tmp_path, pooling, rows):
    path = add_modules(small_checkpoint(tmp_path / "m", **NO_WEIGHTS), pooling, normalizes=False)
    assert spec_of(path) == PoolingSpec(task="embed", size=64, rows=rows, normalize=False)
    changed = spec_of(path, pooling={"type": "last", "normalize": True})
    assert changed.rows == "last" and changed.normalize
    assert configured(path, task="generate").pooling is None


def test_the_tokens_of_a_cross_encoder_are_read(tmp_path):
    path = small_checkpoint(tmp_path / "m", **NO_WEIGHTS)
    modules = (
        '[{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "b.LogitScore"}]'
    )
    (path / "modules.json").write_text(modules)
    (path / "1_LogitScore").mkdir()
    ids = path / "1_LogitScore" / "config.json"
    ids.write_text('{"true_token_id": 7, "false_token_id": 5}')
    assert spec_of(path).score_tokens == (5, 7) and spec_of(path).activation == "sigmoid"
    ids.write_text('{"true_token_id": 7, "false_token_id": null}')
    (path / "config_sentence_transformers.json").write_text(
        '{"activation_fn": "torch.nn.modules.linear.Identity"}'
    )
    assert spec_of(path).score_tokens == (7,) and spec_of(path).activation == "none"


@pytest.mark.parametrize(
    ("labels", "fields", "task", "activation"),
    [
        (3, {}, "classify", "softmax"),
        (3, {"problem_type": "multi_label_classification"}, "classify", "sigmoid"),
        (1, {}, "score", "sigmoid"),
        (1, {"problem_type": "regression"}, "score", "none"),
    ],
)
def test_a_classification_head_classifies_or_scores(tmp_path, labels, fields, task, activation):
    path = class_checkpoint(tmp_path / "m", labels, **fields, **NO_WEIGHTS)
    config = load_model_config(path)
    assert config.pooling is not None
    assert (config.pooling.task, config.pooling.activation) == (task, activation)
    assert config.pooling.labels == tuple(f"kind {index}" for index in range(labels))
    assert "score.weight" in names_of(config) and "lm_head.weight" not in names_of(config)


def text_settings(task: str, **more: Any) -> str:
    """sentence_bert_config.json as versions 5.4 to 6.2 write it where the tokenizer has a chat template."""
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    return json.dumps(
        {
            "transformer_task": task,
            "modality_config": {"text": output, "message": {**output, "format": "structured"}},
            "module_output_name": "token_embeddings",
            **more,
        }
    )


def test_texts_are_messages_where_the_files_of_sentence_transformers_say_so(tmp_path):
    path = small_checkpoint(tmp_path / "m", **NO_WEIGHTS)
    add_modules(path, {"pooling_mode": "lasttoken", "include_prompt": True})
    file = path / "sentence_bert_config.json"
    assert (
        spec_of(path).chat_options is None
    )  # Qwen3-Embedding has no such file, but a chat template
    file.write_text('{"max_seq_length": 512, "do_lower_case": false}')
    assert spec_of(path).chat_options is None
    settings = json.loads(text_settings("feature-extraction"))
    del settings["modality_config"]["message"]
    file.write_text(json.dumps(settings))
    assert spec_of(path).chat_options is None
    file.write_text(text_settings("feature-extraction"))
    assert spec_of(path).chat_options == {} and str(spec_of(path)).endswith("by the chat template")
    keywords = {"add_generation_prompt": True, "restore_suffix": True, "max_length": 512}
    file.write_text(text_settings("any-to-any", processing_kwargs={"chat_template": keywords}))
    assert spec_of(path).chat_options == {"add_generation_prompt": True}
    assert configured(path, task="generate").pooling is None


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_pooling_without_the_tokens_of_prompts_is_refused_where_there_are_prompts(tmp_path, mode):
    path = small_checkpoint(tmp_path / "m", **NO_WEIGHTS)
    add_modules(path, {"embedding_dimension": 64, "pooling_mode": mode, "include_prompt": False})
    file = path / "config_sentence_transformers.json"

    def names_prompts(**prompts: str) -> None:
        file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))

    assert spec_of(path).rows == mode.removesuffix("token")
    names_prompts(query="", document="")
    assert spec_of(path).rows == mode.removesuffix("token")
    names_prompts(query="Q: ", document="")
    if mode != "lasttoken":
        with pytest.raises(ModelConfigError, match="include_prompt: false, but the tokens of prom"):
            load_model_config(path)
    assert spec_of(path, pooling={"type": mode.removesuffix("token")}).task == "embed"
    assert configured(path, task="generate").pooling is None
    (path / "sentence_bert_config.json").write_text(text_settings("feature-extraction"))
    assert spec_of(path).chat_options == {}  # a prompt is a system message, which counts


LINEAR, CURVES = "torch.nn.modules.linear", "torch.nn.modules.activation"


def saved(name: str) -> dict[str, Any]:
    """What CrossEncoder.save_pretrained of versions 4 and 5 adds to config.json, beside no modules.json."""
    return {"sentence_transformers": {"activation_fn": name, "version": "4.1.0"}}


@pytest.mark.parametrize(
    ("labels", "fields", "activation"),
    [
        (1, saved(f"{LINEAR}.Identity"), "none"),
        (1, saved(f"{CURVES}.Sigmoid"), "sigmoid"),
        (3, saved(f"{LINEAR}.Identity"), "none"),
        (3, saved(f"{CURVES}.Sigmoid"), "sigmoid"),
        (3, {"sentence_transformers": {"version": "4.1.0"}}, "softmax"),
        (1, {"sbert_ce_default_activation_function": f"{LINEAR}.Identity"}, "none"),
        (1, {"sbert_ce_default_activation_function": None}, "sigmoid"),
    ],
)
def test_the_activation_of_a_cross_encoder_in_config_json(tmp_path, labels, fields, activation):
    path = class_checkpoint(tmp_path / "m", labels, **fields, **NO_WEIGHTS)
    assert spec_of(path).activation == activation


def test_the_newer_file_has_the_activation_before_config_json(tmp_path):
    path = class_checkpoint(tmp_path / "m", 1, **saved(f"{CURVES}.Sigmoid"), **NO_WEIGHTS)
    (path / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "a.Transformer"}]'
    )
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({"activation_fn": f"{LINEAR}.Identity", "model_type": "CrossEncoder"})
    )
    assert spec_of(path).activation == "none"


def test_an_activation_of_another_name_is_refused(tmp_path):
    words = r"activation_fn is '.*Tanh'; supported: Identity, Sigmoid, Softmax"
    with pytest.raises(ModelConfigError, match=words):
        class_checkpoint(tmp_path / "m", 1, **saved(f"{CURVES}.Tanh"), **NO_WEIGHTS)
    path = small_checkpoint(tmp_path / "n", **saved(f"{CURVES}.Tanh"), **NO_WEIGHTS)
    assert spec_of(path, task="embed").activation == "none"


@pytest.mark.parametrize(
    ("fields", "wanted", "expected"),
    [
        ({}, "auto", ()),
        ({"is_matryoshka": True}, "auto", None),
        ({"matryoshka_dimensions": [32, 16]}, "auto", (16, 32)),
        ({"matryoshka_dimensions": [32, 16]}, "any", None),
        ({"is_matryoshka": True}, [8], (8,)),
    ],
)
def test_matryoshka_dimensions(tmp_path, fields, wanted, expected):
    path = small_checkpoint(tmp_path / "m", **fields, **NO_WEIGHTS)
    assert spec_of(path, task="embed", pooling={"dimensions": wanted}).dimensions == expected


@pytest.mark.parametrize(
    ("part", "section", "words"),
    [
        (
            "causal",
            {"task": "classify"},
            "model.task is classify, but the checkpoint is a generating",
        ),
        ("base", {"task": "generate"}, "a base model without logits"),
        ("base", {"task": "score"}, "a base model without logits"),
        ("classes", {"task": "embed"}, "a classification head of 2 class(es)"),
        ("classes", {"task": "score"}, "a classification head of 2 class(es)"),
        (
            "causal",
            {"task": "embed", "pooling": {"dimensions": [65]}},
            "65; expected 1 to hidden_size (64)",
        ),
    ],
)
def test_a_task_that_the_weights_have_not_is_refused(tmp_path, part, section, words):
    make: dict[str, Any] = {
        "causal": lambda path: small_checkpoint(path, **NO_WEIGHTS),
        "base": lambda path: small_checkpoint(path, architectures=[f"{QWEN}Model"], **NO_WEIGHTS),
        "classes": lambda path: class_checkpoint(path, 2, **NO_WEIGHTS),
    }
    with pytest.raises(ModelConfigError) as error:
        configured(make[part](tmp_path / "m"), **section)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "the mode 'max'; supported: lasttoken, mean, cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "'cls+mean'"),
    ],
)
def test_other_pooling_is_refused_by_name(tmp_path, pooling, words):
    path = add_modules(small_checkpoint(tmp_path / "m", **NO_WEIGHTS), pooling)
    with pytest.raises(ModelConfigError) as error:
        load_model_config(path)
    assert words in str(error.value)
    assert load_model_config(path, ModelSection(path=str(path), pooling={"type": "mean"})).pooling


def test_other_modules_and_other_architectures_are_refused_by_name(tmp_path):
    path = small_checkpoint(tmp_path / "m", **NO_WEIGHTS)
    (path / "modules.json").write_text(
        '[{"path": "2_Dense", "type": "sentence_transformers.Dense"}]'
    )
    with pytest.raises(ModelConfigError, match="has the module 'Dense'; supported"):
        load_model_config(path)
    with pytest.raises(ModelConfigError, match="ForTokenClassification"):
        small_checkpoint(tmp_path / "n", architectures=[f"{QWEN}ForTokenClassification"])
