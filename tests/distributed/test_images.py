"""Greedy tokens and logits of prompts with images equal transformers', whatever the steps and the ranks.

Each family meets some conditions in turn; the exhaustive runs take each family through all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engine_harness import Event, RankResult, rank_config, run_engines
from tests.distributed.reference import Reference, check
from tests.distributed.test_epochs import NUM_RANKS, TOKENS_AN_EPOCH, live
from tests.image_case import FAMILIES, Prompt, arrivals, image_checkpoint, prompts, references
from workers.models.registry import load_model_config
from workers.rank.process_group import local_rendezvous

COUNT = 10


@dataclass(frozen=True)
class Condition:
    """Settings of a run. `again`: all requests once more, when the first are answered."""

    settings: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    ranks: int = 1
    again: bool = False


CONDITIONS = {
    "whole steps": Condition(ranks=2),
    "chunks of 7": Condition(
        {"scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 4, "async_scheduling": True}}
    ),
    # The embeddings of two images or so are kept, and all prompts are in the prefix cache.
    "prefixes": Condition(
        {"cache": {"image_tokens": 100}, "scheduler": {"max_image_tokens": 60}}, again=True
    ),
    "preemption": Condition(
        {
            "scheduler": {"max_num_batched_tokens": 48, "async_scheduling": True},
            "cache": {"num_blocks": 40, "block_size": 8, "image_tokens": 100},
            "model": {"max_model_len": 320},
        },
        again=True,
    ),
    "ubatches": Condition(
        {"scheduler": {"max_num_batched_tokens": 64}, "overlap": {"mode": "on", "num_ubatches": 2}},
        ranks=2,
    ),
    "drafts": Condition(
        {"speculation": {"method": "ngram", "num_draft_tokens": 3, "adaptive": False}}, ranks=2
    ),
    "four ranks": Condition({"kernels": {"all2all": "torch_dist"}}, ranks=4),
}
IN_TURN = {
    "qwen3_5_moe": ("whole steps", "chunks of 7", "preemption"),
    "qwen3_vl_moe": ("chunks of 7", "prefixes", "ubatches"),
    "glm4v_moe": ("prefixes", "drafts"),
}
SAMPLES = [(family, name) for family, names in IN_TURN.items() for name in names]
OTHERS = [
    pytest.param(family, name, marks=pytest.mark.exhaustive)
    for family in FAMILIES
    for name in CONDITIONS
    if name not in IN_TURN[family]
]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoint, prompts and what transformers generates, by family."""

    @cache
    def find(family: str) -> tuple[Path, list[Prompt], list[Reference]]:
        path = image_checkpoint(
            tmp_path_factory.mktemp(family), family, mtp=family == "qwen3_5_moe"
        )
        spec = load_model_config(path).vision
        assert spec is not None
        asked = prompts(spec, COUNT)
        return path, asked, references(path, asked)

    return find


@pytest.mark.parametrize(("family", "name"), [*SAMPLES, *OTHERS])
def test_tokens_and_logits_equal_transformers(
    rank_pool: Any, case: Any, family: str, name: str
) -> None:
    path, asked, expected = case(family)
    condition = CONDITIONS[name]
    drafts = name == "drafts"
    config = rank_config(path, condition.ranks, **condition.settings)
    events = arrivals(asked, condition.ranks)
    if drafts:
        events = [guessing(event, expected) for event in events]
    if condition.again:
        later = [
            replace(event, step=event.step + 300, request=named(event.request, COUNT))
            for event in events
        ]
        events, expected = events + later, expected * 2
    results = run_engines(rank_pool, config, events, keep_logits=not drafts)
    check(expected, results, len(expected))
    assert all(result.num_microbatched > 0 for result in results) == (name == "ubatches")
    assert (sum(result.num_preemptions for result in results) > 0) == (name == "preemption")
    assert (sum(result.num_accepted_tokens for result in results) > 0) == drafts
    if name == "prefixes" and family != "qwen3_5_moe":  # of which a state is kept at few places
        assert results[0].prefix_cache_hits > 0
    assert_computed_once(asked, results, condition)


def guessing(event: Event, expected: list[Reference]) -> Event:
    """The same request, which predicts its answer."""
    request = event.request
    assert request is not None
    found = tuple(expected[int(request.request_id)].tokens)
    params = replace(request.params, prediction_token_ids=found)
    return replace(event, request=replace(request, params=params))


def named(request: Any, more: int) -> Any:
    return replace(request, request_id=str(int(request.request_id) + more))


def assert_computed_once(
    asked: list[Prompt], results: list[RankResult], condition: Condition
) -> None:
    """Each rank computes each image of its requests once, where its cache can hold them all."""
    for rank, result in enumerate(results):
        own = asked[rank :: condition.ranks]
        digests = {image.digest for prompt in own for image in prompt.images}
        if "image_tokens" in condition.settings.get("cache", {}):
            assert result.images_computed > len(digests)
        else:
            assert result.images_computed == len(digests)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "asynchronous"])
def test_multi_token_prediction_beside_images(
    rank_pool: Any, case: Any, asynchronous: bool
) -> None:
    """The drafts of the checkpoint's head follow the positions behind an image; no token changes."""
    path, asked, expected = case("qwen3_5_moe")
    config = rank_config(
        path,
        1,
        speculation={"method": "mtp", "num_draft_tokens": 2, "adaptive": False},
        scheduler={"async_scheduling": asynchronous, "max_num_batched_tokens": 50},
    )
    results = run_engines(rank_pool, config, arrivals(asked, 1))
    check(expected, results, COUNT)
    assert results[0].num_draft_tokens > 0


def test_an_abort_while_images_are_computed(rank_pool: Any, case: Any) -> None:
    """Prompts behind it go on, and a later request finds what was computed."""
    path, asked, expected = case("qwen3_5_moe")
    events = arrivals(asked, 1)
    aborted = [index for index, prompt in enumerate(asked) if len(prompt.images) > 1]
    gone = [
        Event(event.step, 0, named(event.request, 100))
        for index, event in enumerate(events)
        if index in aborted
    ]
    events = [*gone, *(Event(it.step, 0, abort=it.request.request_id) for it in gone), *events]
    results = run_engines(rank_pool, rank_config(path, 1), events, keep_logits=True)
    check(expected, results, COUNT)


def test_images_outlive_the_death_of_a_rank(rank_pool: Any, case: Any) -> None:
    """Requests that the next epoch gets again, with the tokens that were emitted, keep their positions and images."""
    path, asked, _ = case("qwen3_vl_moe")
    num_epochs = 3
    chosen = [prompt for prompt in asked if prompt.images][:NUM_RANKS]
    limits = {"max_tokens": 2 * num_epochs * TOKENS_AN_EPOCH}
    requests = [[prompt.request(str(rank), **limits)] for rank, prompt in enumerate(chosen)]
    config = rank_config(path, NUM_RANKS, cache={"num_blocks": 128})
    events = [Event(0, rank, request) for rank, (request,) in enumerate(requests)]
    undisturbed = run_engines(rank_pool, config, events)
    with local_rendezvous() as rendezvous:
        arguments = (config, rendezvous, requests, num_epochs)
        found = rank_pool.run(live, NUM_RANKS, *arguments, with_group=False, timeout_s=120)
    for rebuilt, whole in zip(found, undisturbed, strict=True):
        assert rebuilt.tokens == whole.tokens
