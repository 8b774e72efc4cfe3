"""The section `speculation`: mistakes, `auto`, what `phalanx check` prints, memory; predictions, usage and counts."""

from pathlib import Path

import pytest

from cluster.api.request.prediction import predicted_text
from cluster.commands.check import check
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from cluster.errors import BadRequestError
from cluster.metrics.metrics import IngressMetrics
from tests.checkpoints.writer import make_checkpoint
from tests.unit.api_fakes import Api, FakeBackend, says, tiny_tokenizer
from tests.unit.test_metrics import RANK_STATS
from workers.models.registry import configured_model
from workers.rank.device_memory import size
from workers.weights.checkpoint_files import tensor_names
from workers.wire.request import RequestOutput, merge

ON = "speculation.method=ngram"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A YAML for a model with attention in all layers, and for a model with linear attention."""
    folder, found = tmp_path_factory.mktemp("speculation"), {}
    for family in ("qwen3_moe", "qwen3_next"):
        checkpoint = make_checkpoint(folder / family, family=family, hidden_size=32)
        found[family] = folder / f"{family}.yaml"
        found[family].write_text(f"model: {{path: {checkpoint}}}\ncluster: {{device: cpu}}\n")
    return found


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "qwen3_moe",
            ["speculation.num_draft_tokens=0"],
            r"num_draft_tokens: 0 .* than or equal to 1",
        ),
        ("qwen3_moe", ["speculation.num_draft_tokens=17"], "17 is not allowed: .* equal to 16"),
        ("qwen3_moe", ["speculation.method=tree"], 'method: "tree" is not allowed'),
        (
            "qwen3_moe",
            ["speculation.num_draft_token=2"],
            "did you mean speculation.num_draft_tokens",
        ),
        (
            "qwen3_moe",
            [ON, "scheduler.max_num_batched_tokens=4", "scheduler.max_num_seqs=2"],
            r"num_draft_tokens: 4 drafts .* are 5 rows of one step, .*max_num_batched_tokens is 4",
        ),
        ("qwen3_moe", [ON, "model.max_model_len=4"], "max_model_len is 4; lower the first"),
        (
            "qwen3_moe",
            [ON, "model.task=embed"],
            "method: ngram drafts tokens, the task embed has none",
        ),
    ],
)
def test_mistakes_are_named(models, family, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(models[family], settings)


@pytest.mark.parametrize(
    ("family", "method", "resolved"),
    [
        ("qwen3_moe", "auto", "ngram"),
        ("qwen3_next", "auto", "ngram"),
        ("qwen3_next", "off", "off"),
        ("qwen3_moe", "off", "off"),
        ("qwen3_moe", "ngram", "ngram"),
    ],
)
def test_auto_is_what_the_model_allows(models, family, method, resolved) -> None:
    config = load_config(models[family], [f"speculation.method={method}"])
    rank = resolve_rank_config(config, num_gpus=0)
    assert rank.speculation.method == resolved
    rows = 64 if resolved == "off" else 5 * 64
    assert rank.max_logits_rows == rows


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3_next", {}), ("qwen3_5_moe", {}), ("glm4_moe", {"num_nextn_predict_layers": 1})],
)
def test_auto_takes_the_head_that_a_checkpoint_has(tmp_path, family, changes, num_shards) -> None:
    found = {}
    for name, options in {
        "with": {"mtp": True},
        "without": {},
        "dummy": {"weights": False},
    }.items():
        path = make_checkpoint(
            tmp_path / name,
            family=family,
            hidden_size=32,
            num_shards=num_shards,
            **options,
            **changes,
        )
        weights = "dummy" if name == "dummy" else "checkpoint"
        section = {"path": str(path), "weights": weights}
        config = load_config({"model": section, "speculation": {"method": "auto"}})
        found[name] = resolve_rank_config(config, num_gpus=0).speculation.method
    assert found == {"with": "mtp", "without": "ngram", "dummy": "mtp"}


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 9, (3).to_bytes(8, "little") + b"[1]", (1).to_bytes(8, "little") + b"5"],
)
def test_a_broken_file_has_no_names_of_tensors(tmp_path, content) -> None:
    assert tensor_names(tmp_path) == frozenset()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert tensor_names(tmp_path) == frozenset()
    (tmp_path / "model.safetensors").write_bytes(content)
    assert not tensor_names(tmp_path) & {"mtp.fc.weight"}


def test_check_names_the_drafter_and_its_memory(models) -> None:
    def checked(family: str, *settings: str):
        return check(load_config(models[family], settings), num_api_keys=0)

    on = checked("qwen3_moe", ON)
    assert on.steps["speculation"].startswith(
        "ngram: up to 4 drafts of a sequence in a step, as many"
    )
    assert "256 more rows of logits take" in on.steps["speculation"]
    off = checked("qwen3_moe")
    assert off.steps["speculation"] == "off; ngram is possible"
    assert on.ranks[0].buffer_bytes > off.ranks[0].buffer_bytes
    assert on.ranks[0].state_bytes == 0 and "linear attention" not in on.steps["speculation"]


def test_check_names_the_memory_of_drafts_beside_states(models) -> None:
    def checked(*settings: str):
        fixed = ["cache.num_blocks=256", *settings]  # so that drafts take nothing of snapshots
        return check(load_config(models["qwen3_next"], fixed), num_api_keys=0)

    three, four = (checked(ON, f"speculation.num_draft_tokens={count}") for count in (3, 4))
    config = configured_model(load_config(models["qwen3_next"]).model)
    row = sum(spec.channels + 2 * spec.num_value_heads for spec in config.linear_specs)
    each = 4 * row * 65  # of a draft of 64 sequences and of padding, in float32
    assert three.ranks[0].state_bytes - checked().ranks[0].state_bytes == 3 * each
    assert four.ranks[0].state_bytes - three.ranks[0].state_bytes == each
    words = f"inputs of drafts beside the states of linear attention {size(3 * each)}"
    assert three.steps["speculation"].endswith(words)
    assert checked().steps["speculation"].startswith("off; ngram is possible, and mtp")


class Drafting(FakeBackend):
    """A backend with drafts in each step."""

    async def generate(self, *args, **options):
        async for output in super().generate(*args, **options):
            output.drafts = (3, 1)
            yield output


def test_a_prediction_is_tokenised_and_drafts_are_in_usage() -> None:
    api = Api(Drafting(says("hello", end=[258])))
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    body = api.chat("hi", prediction={"type": "content", "content": parts}).json()
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 6 * 3
    assert details["rejected_prediction_tokens"] == 6 * 1
    ((_, params),) = api.backend.requests.values()
    assert list(params.prediction_token_ids) == tiny_tokenizer().encode(
        "hello", add_special_tokens=False
    )


WRONG_PREDICTIONS = [
    "text",
    {"type": "image"},
    {"type": "content", "content": 3},
    {"type": "content", "content": [{"type": "text"}]},
    {"type": "content", "content": "\ud800"},
    {"type": "content", "content": [{"type": "text", "text": "a\udfff"}]},
]


@pytest.mark.parametrize("value", WRONG_PREDICTIONS)
def test_wrong_predictions_are_refused(value) -> None:
    with pytest.raises(BadRequestError, match="prediction"):
        predicted_text(value)


def test_drafts_of_merged_outputs_add_up() -> None:
    first, second, third = (RequestOutput("a", [1]) for _ in range(3))
    first.drafts, third.drafts = (1, 2), (3, 0)
    assert merge([first, second, third]).drafts == (4, 2)
    assert merge([second]).drafts is None


def test_counts_have_the_names_of_vllm() -> None:
    text = IngressMetrics().render([RANK_STATS]).decode()
    for name, count in (("drafts", 12), ("draft_tokens", 40), ("accepted_tokens", 25)):
        assert f'phalanx:spec_decode_num_{name}_total{{model_name="",rank="0"}} {count}.0' in text
    place = 'spec_decode_num_accepted_tokens_per_pos_total{model_name="",position="2",rank="0"} 6.0'
    assert place in text
