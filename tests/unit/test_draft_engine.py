"""Engines with draft models: tokens equal those without, on one rank stepped by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints.eagle3 import make_eagle3
from tests.distributed.engine_harness import make_request, rank_config
from tests.family_cases import family_checkpoint
from tests.unit.draft_case import OneRankDraft
from workers.models.config_reader import ModelConfigError
from workers.models.registry import load_model_config
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.draft_passes import Drafted, DraftPasses
from workers.sampling.sampler import SampledTokens, Sampler
from workers.speculation.drafter import NewTokens
from workers.speculation.model_drafter import ModelDrafter
from workers.step.drafts import Drafts
from workers.step.step_sync import LockstepError
from workers.weights.checkpoint_files import CheckpointError
from workers.wire.request import RequestOutput

PROMPTS = {"a": [5, 6, 7], "b": list(range(100, 140)), "c": [200] * 17}
PARAMS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft-engine")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """Sections of the configuration by method."""
    heads = family_checkpoint(
        folder / "mtp", "glm4_moe", "tied", mtp=True, num_nextn_predict_layers=1
    )
    states = family_checkpoint(folder / "states", "qwen3_next", "untied", mtp=True)
    target = family_checkpoint(folder / "target", "qwen3_moe", "untied")
    draft = make_eagle3(folder / "draft", load_model_config(target))
    return {
        "mtp": {"model": {"path": str(heads)}, "speculation": {"method": "mtp"}},
        "mtp of states": {"model": {"path": str(states)}, "speculation": {"method": "mtp"}},
        "eagle3": {
            "model": {"path": str(target)},
            "speculation": {"method": "eagle3", "draft_model": str(draft)},
        },
    }


def run(
    sections: dict[str, dict[str, Any]],
    params: dict[str, Any],
    prepare: Callable[[Epoch], None] = lambda epoch: None,
    **changes: Any,
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the tokens of each request and counts of what happened. prepare: called before the engine starts."""
    found: dict[str, list[int]] = {}
    counts = {"steps": 0, "drafted": 0, "accepted": 0}

    def publish(_ingress: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
            if output.drafts is not None:
                counts["accepted"] += output.drafts[0]
                counts["drafted"] += sum(output.drafts)

    path = Path(sections["model"]["path"])
    config = rank_config(path, 1, **{**sections, **changes})
    process = RankProcess(0, config)
    try:
        epoch = Epoch(process, Rendezvous("127.0.0.1", 0, "alone"), 10)
        epoch.load()
        prepare(epoch)
        epoch.start_engine(publish, lambda step: None)
        for name, prompt in PROMPTS.items():
            epoch.engine.submit(make_request(name, prompt, **{"max_tokens": 24, **params}))
        while epoch.engine.step().run:
            counts["steps"] += 1
            epoch.scheduler.check_integrity()
        assert epoch.scheduler.cache.pool.usage == 0
    finally:
        process.close()
    return found, counts


@pytest.mark.parametrize("method", ["mtp", "mtp of states", "eagle3"])
@pytest.mark.parametrize("params", PARAMS)
def test_tokens_equal_those_without_drafts(
    checkpoints: dict[str, dict[str, Any]], method: str, params: dict[str, Any]
) -> None:
    """With chunks of prompts beside decodes, and drafts that end with the memory of their sequence."""
    sections = checkpoints[method]
    small = {"scheduler": {"max_num_batched_tokens": 32}}
    plain = {"model": sections["model"]}
    expected, _ = run(plain, params, **small)
    speculation = sections["speculation"] | {"num_draft_tokens": 3, "adaptive": False}
    found, counts = run(sections, params, speculation=speculation, **small)
    assert found == expected
    assert counts["drafted"] > 20, counts


@pytest.mark.parametrize("method", ["mtp", "mtp of states", "eagle3"])
def test_drafts_are_those_of_the_draft_model_alone(
    checkpoints: dict[str, dict[str, Any]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts in chunks, decodes, and steps with accepted and rejected drafts."""
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    drafted = ModelDrafter.drafted

    def record(drafter: ModelDrafter, new: NewTokens, drafts: Drafts) -> None:
        changed = list(drafts.references)
        for seq, index in zip(new.seqs, new.indices, strict=True):
            token_ids = drafts.read(index)
            seen.append((list(seq.token_ids), token_ids))
            # one right draft now and then, which no random model has
            right = expected[seq.request.request_id][seq.num_output_tokens :][:1]
            changed[index] = (*right, *token_ids[1:]) if len(seen) % 2 else token_ids
        drafted(drafter, new, Drafts.known(changed))

    sections = checkpoints[method]
    params, small = {"max_tokens": 12}, {"scheduler": {"max_num_batched_tokens": 32}}
    expected, _ = run({"model": sections["model"]}, params, **small)
    monkeypatch.setattr(ModelDrafter, "drafted", record)
    speculation = sections["speculation"] | {"num_draft_tokens": 3, "adaptive": False}
    found, counts = run(sections, params, speculation=speculation, **small)
    assert found == expected and counts["accepted"] > 3
    assert {1, 3} <= {len(drafts) for _, drafts in seen}
    draft_model = speculation.get("draft_model")
    path = Path(sections["model"]["path"])
    alone = OneRankDraft(path, None if draft_model is None else Path(draft_model))
    for tokens, drafts in seen:
        chain = alone.drafts(tokens[:-1], tokens[-1], len(drafts))
        assert chain == list(drafts), (len(tokens), chain, drafts)


def test_a_rank_that_fails_to_sample_runs_the_passes_of_its_draft_model(
    checkpoints: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers wait for the experts of these passes; the error is voted afterwards."""
    tokens: list[bool] = []
    run_passes = DraftPasses.run

    def count(passes: DraftPasses, *arguments: Any) -> Drafted:
        tokens.append(arguments[4] is not None)
        return run_passes(passes, *arguments)

    sample = Sampler.sample

    def fail(*arguments: Any) -> SampledTokens:
        if len(tokens) < 2:  # the warm-up
            return sample(*arguments)
        raise RuntimeError("no sample")

    monkeypatch.setattr(DraftPasses, "run", count)
    monkeypatch.setattr(Sampler, "sample", fail)
    with pytest.raises(LockstepError, match="no sample"):
        run(checkpoints["mtp"], {})
    assert tokens == [True, True, False]


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_synthetic_acceptance_has_the_given_shares(
    checkpoints: dict[str, dict[str, Any]], method: str
) -> None:
    model = checkpoints["mtp"]["model"] | {"weights": "dummy"}
    speculation = {"method": method, "num_draft_tokens": 3, "accept_lengths": [0.9, 0.5]}
    sections = {"model": model, "speculation": speculation | {"adaptive": False}}
    params = {"max_tokens": 200, "allowed_token_ids": (4, 5)}
    found, counts = run(sections, params)
    assert (found, counts) == run(sections, params)
    assert all(len(tokens) == 200 for tokens in found.values())
    # of three drafts 0.9 + 0.45 + 0.225 are accepted; the first draft behind a prompt may be alone
    assert 0.44 < counts["accepted"] / counts["drafted"] < 0.62, counts


def test_drafts_of_a_wrong_checkpoint_are_refused_by_key(
    checkpoints: dict[str, dict[str, Any]], folder: Path
) -> None:
    target = checkpoints["eagle3"]["model"]
    with pytest.raises(ModelConfigError, match=r"speculation\.method: mtp needs .*qwen3_moe"):
        run({"model": target, "speculation": {"method": "mtp"}}, {})
    with pytest.raises(ModelConfigError, match=r"speculation\.draft_model: eagle3 needs"):
        run({"model": target, "speculation": {"method": "eagle3"}}, {})
    speculation = {"method": "eagle3", "draft_model": str(folder / "nothing")}
    with pytest.raises(ModelConfigError, match=r"speculation\.draft_model: .*nothing"):
        run({"model": target, "speculation": speculation}, {})
    heads = family_checkpoint(
        folder / "parts", "glm4_moe", "tied", mtp=True, num_nextn_predict_layers=1
    )
    file = heads / "model.safetensors"
    kept = {name: it for name, it in load_file(file).items() if "layers.3.enorm" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    sections = {"model": {"path": str(heads)}, "speculation": {"method": "mtp"}}
    with pytest.raises(
        CheckpointError, match=r"speculation\.method: .*missing: .*layers\.3\.enorm"
    ):
        run(sections, {})
