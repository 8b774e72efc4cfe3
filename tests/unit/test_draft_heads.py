"""Heads for multi-token prediction and EAGLE-3 draft models: their logits equal references, at every depth."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.eagle3 import OUTPUTS, make_eagle3
from tests.draft_reference import (
    DraftReference,
    PlainEagle3,
    QwenMtp,
    TransformersMtp,
    draft_logits,
)
from tests.family_cases import family_checkpoint
from tests.unit.draft_case import OneRankDraft
from workers.models.config_reader import ModelConfigError
from workers.models.eagle3.config import LAYER_CONFIG, load_eagle3_config
from workers.models.registry import load_model_config
from workers.weights.checkpoint_files import CheckpointError

PROMPTS = [[5, 6, 7, 8, 200, 13], list(range(40, 66)), [9, 9, 300, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
NEXT = [17, 250, 4]
# Keys of a layer of Qwen3, the default of the speculators library, beside those of a layer of Llama.
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "layer_types": ["full_attention"],
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
DEPTH = 3
HEADS = [
    ("qwen3_next", "untied", {}),
    ("qwen3_5_moe", "tied", {}),
    ("deepseek_v3", "untied", {"num_nextn_predict_layers": 1}),
    ("glm4_moe", "tied", {"num_nextn_predict_layers": 1}),
    ("glm4_moe_lite", "untied", {"num_nextn_predict_layers": 1}),
]


def check(reference: DraftReference, draft: OneRankDraft) -> None:
    found = draft.logits(PROMPTS, NEXT, DEPTH)
    for index, (prompt, token) in enumerate(zip(PROMPTS, NEXT, strict=True)):
        expected = draft_logits(reference, prompt, token, DEPTH)
        for depth in range(DEPTH):
            torch.testing.assert_close(found[depth][index], expected[depth], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "variant", "changes"), HEADS)
def test_logits_of_a_head_equal_transformers(
    tmp_path: Path, family: str, variant: str, changes: dict[str, Any]
) -> None:
    path = family_checkpoint(tmp_path, family, variant, mtp=True, **changes)
    if family.startswith("qwen"):
        check(QwenMtp(path), OneRankDraft(path))
        return
    # releases repeat embedding and output head in the layer
    file, layer = path / "model.safetensors", "model.layers.3."
    repeated = {
        f"{layer}embed_tokens.weight": torch.ones(2),
        f"{layer}shared_head.head.weight": torch.ones(2),
    }
    reference = TransformersMtp(path)
    save_file(load_file(file) | repeated, file, metadata={"format": "pt"})
    check(reference, OneRankDraft(path))


def test_a_head_reads_prompts_in_chunks(tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, "qwen3_next", "all_full", mtp=True)
    draft, prompts = OneRankDraft(path), [list(range(30)), list(range(30, 60))]
    whole = draft.logits(prompts, NEXT[:2], DEPTH)
    for one, other in zip(whole, draft.logits(prompts, NEXT[:2], DEPTH, chunk=10), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("target"), "qwen3_moe", "untied")


@pytest.mark.parametrize(
    ("layout", "without", "changes"),
    [
        ("eagle", (), {}),
        ("eagle", ("embed_tokens.weight",), {"attention_bias": True}),
        ("speculators", ("embed_tokens.weight",), {"norm_before_residual": True}),
        ("speculators", (), {"norm_before_fc": True, "norm_output": True}),
        ("eagle", ("lm_head.weight",), {"draft_vocab_size": 320}),
        # EAGLE 3.1, as TorchSpec and SpecForge write it for a target with experts
        (
            "eagle",
            (),
            {
                "fc_norm": True,
                "norm_output": True,
                "num_aux_hidden_states": 3,
                "decoder_sparse_step": 1,
            },
        ),
        ("speculators", (), {"fc_norm": True}),
    ],
)
def test_logits_of_eagle3_equal_plain_torch(
    target: Path, tmp_path: Path, layout: str, without: tuple[str, ...], changes: dict[str, Any]
) -> None:
    config = load_model_config(target)
    draft = make_eagle3(tmp_path / "draft", config, layout, without=without, **changes)
    check(PlainEagle3(target, draft, changes, OUTPUTS), OneRankDraft(target, draft))


def test_eagle3_with_a_layer_of_qwen3_norms_queries_and_keys(target: Path, tmp_path: Path) -> None:
    config, names = load_model_config(target), ("q_norm", "k_norm")
    extra = {f"layers.0.self_attn.{name}.weight": torch.rand(16) + 0.5 for name in names}
    changes = {LAYER_CONFIG: QWEN3, "architectures": ["Eagle3DraftModel"]}
    draft = make_eagle3(tmp_path, config, "speculators", extra=extra, **changes)
    check(PlainEagle3(target, draft, {}, OUTPUTS), OneRankDraft(target, draft))


def test_eagle3_stores_the_map_of_a_whole_vocabulary_too(target: Path, tmp_path: Path) -> None:
    """SpecForge writes d2t always, and tensors may have the prefix of transformers' models."""
    config, size = load_model_config(target), {"draft_vocab_size": 320}
    extra = {"d2t": torch.zeros(320, dtype=torch.int64), "t2d": torch.ones(320, dtype=torch.bool)}
    draft = make_eagle3(tmp_path, config, extra=extra, **size)
    check(PlainEagle3(target, draft, {}, OUTPUTS), OneRankDraft(target, draft))
    reference, file = PlainEagle3(target, draft, {}, OUTPUTS), draft / "model.safetensors"
    prefixed = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    prefixed["lm_head.weight"] = prefixed.pop("model.lm_head.weight")
    save_file(prefixed, file)
    check(reference, OneRankDraft(target, draft))


def test_an_embedding_that_repeats_the_models_is_shared(target: Path, tmp_path: Path) -> None:
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    config = load_model_config(target)
    for name, tensor in (("own", embedding + 1), ("equal", embedding)):
        extra = {"embed_tokens.weight": tensor}
        draft = OneRankDraft(target, make_eagle3(tmp_path / name, config, extra=extra))
        draft.head.share_embedding()
        assert (draft.head.embed_VD is draft.target.model.embed_VD) == (name == "equal")


def test_eagle3_reads_the_middle_of_its_target_by_default(tmp_path: Path) -> None:
    config = load_model_config(
        family_checkpoint(tmp_path, "qwen3_moe", "untied", num_layers=12, weights=False)
    )
    draft = make_eagle3(tmp_path / "draft", config, eagle_aux_hidden_state_layer_ids=None)
    assert load_eagle3_config(draft, config).aux_layers == (1, 5, 8)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("eagle", {"vocab_size": 400}, ["vocab_size is 400", "(320)"]),
        ("eagle", {"hidden_size": 32}, ["hidden_size is 32", "(64)"]),
        ("eagle", {"target_hidden_size": 48}, ["target_hidden_size is 48", "(64)"]),
        ("eagle", {"draft_vocab_size": 321}, ["draft_vocab_size is 321", "(320)"]),
        ("eagle", {"num_hidden_layers": 2}, ["num_hidden_layers is 2"]),
        ("eagle", {"mlp_bias": True}, ["mlp_bias is true"]),
        ("eagle", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, ["[1, 2, 4]", "1 to 3"]),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, ["[0, 1, 2]"]),
        (
            "speculators",
            {"fc_norm": True, "norm_before_fc": True},
            ["norm_before_fc and fc_norm are true"],
        ),
        ("eagle", {"num_aux_hidden_states": 2}, ["num_aux_hidden_states is 2", "supported: 3"]),
        ("speculators", {"speculators_model_type": "eagle"}, ['"eagle"', '"eagle3"']),
        (
            "speculators",
            {LAYER_CONFIG: {"model_type": "gemma3"}},
            [f'{LAYER_CONFIG}.model_type is "gem'],
        ),
        ("eagle", {"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "supported"]),
        ("eagle", {"architectures": []}, ["architectures is []", "supported"]),
        ("eagle", {"architectures": [["Eagle3Speculator"]]}, ["architectures is [[", "supported"]),
        ("eagle", {"mask_token_id": 7}, ["mask_token_id is 7", "unknown key"]),
    ],
)
def test_a_wrong_draft_model_is_refused_by_key(
    target: Path, tmp_path: Path, layout: str, changes: dict[str, Any], words: list[str]
) -> None:
    config = load_model_config(target)
    with pytest.raises(ModelConfigError) as refused:
        make_eagle3(tmp_path, config, layout, **changes)
    for word in ["speculation.draft_model", *words]:
        assert word in str(refused.value)


def test_tensors_that_a_draft_model_lacks_are_named(target: Path, tmp_path: Path) -> None:
    config = load_model_config(target)
    draft = make_eagle3(tmp_path, config, without=("fc.weight", "d2t"))
    with pytest.raises(CheckpointError, match=r"2 missing: fc\.weight, d2t"):
        OneRankDraft(target, draft)
    draft = make_eagle3(tmp_path, config, without=("lm_head.weight",))
    with pytest.raises(ModelConfigError, match="draft_vocab_size is 100"):
        OneRankDraft(target, draft)


def test_a_checkpoint_without_the_tensors_of_its_head_is_refused(tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, "glm4_moe", "tied", num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\.enorm\.weight"):
        OneRankDraft(path)


def test_families_without_heads_and_heads_that_cannot_be_run(tmp_path: Path) -> None:
    for family in ("qwen3_moe", "minimax_m2", "deepseek_v3"):
        path = family_checkpoint(tmp_path / family, family, "untied", weights=False)
        assert load_model_config(path).mtp is None
    path = family_checkpoint(
        tmp_path, "qwen3_5_moe", "untied", weights=False, mtp_use_dedicated_embeddings=True
    )
    assert load_model_config(path).mtp is None
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["mtp_use_dedicated_embeddings"] = False
    (path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(path).mtp is not None
