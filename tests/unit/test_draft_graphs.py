"""Passes of a draft model in graphs, on a CPU: drafts and tokens are those of eager passes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.late_drafts import running_along
from tests.unit.graph_fakes import EagerGraphs, eager_graphs, make_capturable
from tests.unit.model_case import make_batch
from tests.unit.test_draft_costs import MEASURED
from tests.unit.test_draft_engine import PARAMS, checkpoints, folder, run
from workers.rank.epoch import Epoch
from workers.rank.rank_info import KV_CACHE
from workers.runner.draft_passes import DraftPasses
from workers.runner.draft_rows import IN_SEQUENCE, following_batch, next_tokens
from workers.runner.graph_sizes import GraphKey, GraphSizes, decode_sizes, mixed_sizes
from workers.runner.graph_times import agreed_times, thinned
from workers.speculation.drafter import NewTokens
from workers.speculation.model_drafter import ModelDrafter
from workers.speculation.speculator import Speculator
from workers.speculation.step_times import StepSeconds
from workers.step.drafts import Drafts
from workers.step.step_sync import GraphMode

__all__ = ["checkpoints", "folder"]  # fixtures

DEPTH = 3
SMALL: dict[str, Any] = {"scheduler": {"max_num_batched_tokens": 32}}
SHORT = {"max_model_len": 52}
WHOLE = GraphSizes(decode_sizes(3), mixed_sizes(32), decode_sizes(12), decode_sizes(3), DEPTH)
SIZES = {
    "all": WHOLE,
    "first": GraphSizes(WHOLE.decode, WHOLE.mixed, WHOLE.verify),
    "decodes": WHOLE,  # the draft model's attention takes no prompts in graphs
    "few": GraphSizes((1, 2), (8,), (4,), (1, 2), DEPTH),
}


class Captured:
    """Gives an epoch graphs, and counts the replays of draft models' passes by key."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch):
        self.sizes, self.mixed, self.monkeypatch = SIZES[name], name != "decodes", monkeypatch
        self.replays: Counter[GraphKey] = Counter()
        replay = EagerGraphs._replay

        def count(graphs: EagerGraphs, key: GraphKey, form: Any) -> None:
            self.replays[key] += 1
            replay(graphs, key, form)

        monkeypatch.setattr(EagerGraphs, "_replay", count)

    def __call__(self, epoch: Epoch) -> None:
        epoch.run_stage(KV_CACHE, lambda done, total: None)
        assert epoch.runner.drafts is not None
        make_capturable(epoch.runner.drafts.attention, self.monkeypatch, mixed=self.mixed)
        graphs = eager_graphs(epoch.runner, self.sizes, self.monkeypatch)
        graphs.provide(graphs.keys)
        self.monkeypatch.setattr(epoch.runner, "graphs", graphs)
        epoch.graph_sizes = self.sizes


class Drafted:
    """The drafts of a run by request and tokens before them; some are replaced by `answers` before they are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]]):
        self.seen: list[tuple[str, int, tuple[int, ...]]] = []
        self.answers = answers
        taken = ModelDrafter.drafted

        def record(drafter: ModelDrafter, new: NewTokens, drafts: Drafts) -> None:
            changed = list(drafts.references)
            for seq, index in zip(new.seqs, new.indices, strict=True):
                name, place, token_ids = (
                    seq.request.request_id,
                    seq.num_output_tokens,
                    drafts.read(index),
                )
                self.seen.append((name, place, token_ids))
                right = self.answers[name][place : place + place % (DEPTH + 1)]
                changed[index] = (*right, *token_ids[len(right) :])[: len(token_ids)]
            taken(drafter, new, Drafts.known(changed))

        monkeypatch.setattr(ModelDrafter, "drafted", record)
        # Drafts end with the memory of their sequence, as where no more is free.
        monkeypatch.setattr(Speculator, "num_ahead", 0)


def drafting(sections: dict[str, Any]) -> dict[str, Any]:
    """Sections with a fixed number of drafts, and a context in which sequences end."""
    speculation = sections["speculation"] | {"num_draft_tokens": DEPTH, "adaptive": False}
    return sections | {"model": sections["model"] | SHORT, "speculation": speculation}


@pytest.fixture(scope="module")
def eager(
    checkpoints: dict[str, dict[str, Any]],
) -> Callable[..., tuple[dict[str, list[int]], list[Any]]]:
    """eager(method, params): tokens without drafts, and the drafts of eager passes; graphs of some sizes share them."""

    @cache
    def make(method: str, temperature: float | None, seed: int | None) -> Any:
        params = {} if seed is None else {"temperature": temperature, "seed": seed}
        sections = checkpoints[method]
        plain, _ = run({"model": sections["model"] | SHORT}, params, **SMALL)
        with pytest.MonkeyPatch.context() as patch:
            drafted = Drafted(patch, plain)
            found, counts = run(drafting(sections), params, **SMALL)
        assert found == plain and counts["accepted"] > 10 and len(drafted.seen) > 12
        assert {1, 2, 3} <= {len(drafts) for *_, drafts in drafted.seen}
        return plain, drafted.seen

    return lambda method, params: make(method, params.get("temperature"), params.get("seed"))


@pytest.mark.parametrize(
    ("method", "captured", "params"),
    [
        ("mtp of states", "all", PARAMS[1]),
        *(
            (method, captured, params)
            for method in ("mtp", "eagle3")
            for captured, params in (
                *(("all", params) for params in PARAMS),
                *((captured, {}) for captured in ("first", "decodes", "few")),
            )
        ),
    ],
)
def test_drafts_of_captured_passes_are_those_of_eager_passes(
    checkpoints: dict[str, dict[str, Any]],
    eager: Callable[..., tuple[dict[str, list[int]], list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    captured: str,
    params: dict[str, Any],
) -> None:
    """With chunks of prompts, any number of accepted drafts, and sequences that end with their memory.

    Before each step the passes run along, as on a rank without sequences.
    """
    plain, seen = eager(method, params)
    monkeypatch.setattr(DraftPasses, "run", running_along(DraftPasses.run))
    drafted, graphs = Drafted(monkeypatch, plain), Captured(captured, monkeypatch)
    found, _ = run(drafting(checkpoints[method]), params, graphs, **SMALL)
    assert found == plain
    assert drafted.seen == seen
    modes = {(key.mode.name, key.drafts) for key in graphs.replays}
    first = {("MIXED", 1), ("VERIFY", 1)} if captured != "decodes" else set()
    further = {("DRAFT", DEPTH)} if captured != "first" else set()
    assert modes - {("DECODE", 1)} == first | further


def test_synthetic_acceptance_is_that_of_eager_passes(
    checkpoints: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = {"method": "mtp", "num_draft_tokens": DEPTH, "accept_lengths": [0.9, 0.5]}
    sections = {
        "model": checkpoints["mtp"]["model"] | {"weights": "dummy"},
        "speculation": speculation | {"adaptive": False},
    }
    expected = run(sections, {}, **SMALL)
    graphs = Captured("all", monkeypatch)
    assert run(sections, {}, graphs, **SMALL) == expected
    assert graphs.replays[GraphKey(GraphMode.DRAFT, 3, drafts=DEPTH)]


def test_graphs_are_timed_at_the_start(
    checkpoints: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sizes an octave and the largest; other ranks were slower, and tokens afterwards are those of before."""
    graphs = Captured("all", monkeypatch)
    found: list[StepSeconds | None] = []

    def gather(own: dict[str, Any]) -> list[dict[str, Any] | None]:
        slower = {
            name: [[rows, seconds + 1] for rows, seconds in own[name]]
            for name in own.keys() - {"most"}
        }
        return [own, slower | {"most": DEPTH}]

    def prepare(epoch: Epoch) -> None:
        graphs(epoch)
        found.append(agreed_times(epoch.runner.graphs, None, gather))
        found.append(agreed_times(epoch.runner.graphs, MEASURED, lambda own: [None, own]))

    sections = checkpoints["mtp"]
    speculation = sections["speculation"] | {"num_draft_tokens": DEPTH}
    plain, _ = run({"model": sections["model"]}, {}, **SMALL)
    assert run(sections, {}, prepare, speculation=speculation, **SMALL)[0] == plain
    times, kept = found
    assert times is not None and kept == MEASURED
    fields = asdict(times)
    assert fields.pop("most") == DEPTH
    rows = {name: [count for count, _ in curve] for name, curve in fields.items()}
    assert rows["decode"] == rows["one_draft"] == rows["drafts"] == [1, 2, 3]
    assert rows["verify"] == rows["first"] == [1, 2, 3, 4, 6, 8, 12]
    assert all(seconds > 1 for curve in fields.values() for _, seconds in curve)


def test_the_keys_of_graphs_of_drafts() -> None:
    passes = WHOLE.further_passes()
    assert len(passes) == len(set(passes)) == DEPTH * len(WHOLE.draft)
    assert WHOLE.further_key(2, DEPTH) == GraphKey(GraphMode.DRAFT, 2, drafts=DEPTH)
    assert WHOLE.further_key(3, 1) == GraphKey(GraphMode.DRAFT, 3, drafts=1)
    assert {WHOLE.further_key(rows, k) for rows in range(1, 4) for k in (1, 2, 3)} == set(passes)
    assert WHOLE.further_key(0, DEPTH) is WHOLE.further_key(4, 1) is None
    assert WHOLE.further_key(1, DEPTH + 1) is WHOLE.further_key(1, 0) is None
    assert GraphSizes((1, 2)).further_passes() == []
    deep = GraphSizes((1,), draft=(1,), draft_tokens=12)
    assert [key.drafts for key in deep.further_passes()] == [1, 2, 3, 4, 8, 12]
    assert [deep.further_key(1, count).drafts for count in (4, 5, 9)] == [4, 8, 12]


def test_the_token_behind_each_row() -> None:
    """Of a prompt that goes on, a decode, a decode with a draft and padding."""
    ids = torch.tensor([10, 11, -4, 12, 13, 0])
    follow = torch.from_numpy(np.array([IN_SEQUENCE, -2 - 99, 0, 1, 2, IN_SEQUENCE]))
    found = next_tokens(ids, follow, torch.tensor([20, -1, 22]))
    assert found.tolist() == [11, 99, 20, 0, 22, 10]


def test_the_image_behind_each_row() -> None:
    """Of a part of a prompt with two rows of an image, and of one that begins with an image; none behind the last."""
    batch = make_batch([[10, 300, 300], [300, 300, 12]], [0, 4], padding=1)
    embeds = torch.arange(14.0).view(7, 2, 1)
    batch = replace(batch, image_mask=torch.tensor([0, 1, 1, 1, 1, 0, 0]), image_embeds=embeds)
    follow = torch.tensor(
        [IN_SEQUENCE, IN_SEQUENCE, -2 - 300, IN_SEQUENCE, IN_SEQUENCE, 0, IN_SEQUENCE]
    )
    ids = torch.arange(7)
    found = following_batch(batch, ids, follow)
    assert found.input_ids is ids and found.image_mask is not None
    assert found.image_mask.tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert found.image_embeds is not None and found.image_embeds.shape == (7, 1, 1)
    assert found.image_embeds[:4, 0, 0].tolist() == [2.0, 4.0, 6.0, 8.0]
    text = replace(batch, image_mask=None, image_embeds=None)
    assert following_batch(text, ids, follow).image_mask is None


def test_two_sizes_an_octave_are_measured() -> None:
    sizes = decode_sizes(250)
    assert thinned(sizes) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 250]
