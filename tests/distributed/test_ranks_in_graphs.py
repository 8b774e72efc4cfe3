"""Ranks that replay graphs beside a rank with nothing to do: tokens equal those without graphs and draft models."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kernels.attention import base
from kernels.attention.shared_prefixes import SharingCost
from tests import graph_ranks
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.distributed.rank_pool import RankFailure
from tests.distributed.test_adapters import EXPERTS, made, tokens_of, with_adapters
from tests.distributed.test_adapters import events as adapter_events
from tests.distributed.test_adapters import merged as merged_models
from tests.distributed.test_draft_models import arrivals, drafting, merged
from tests.distributed.test_expert_moves import events as moving_events
from tests.distributed.test_expert_moves import moving_rank
from tests.family_cases import family_checkpoint
from tests.graph_ranks import FAILURES, graph_sizes, run_failing_rank, run_rank_in_graphs
from tests.image_case import arrivals as image_arrivals
from tests.image_case import image_checkpoint
from tests.image_case import prompts as image_prompts
from tests.shared_case import ANY
from tests.triton.device import COMPILED
from workers.models.registry import load_model_config
from workers.rank.process_group import local_rendezvous

VOCAB = 12  # so small that drafts of a random model are right now and then
CASES = [
    # family, graphs, all-to-all, asynchronous, ubatches
    ("qwen3_next", "all", "shm", True, False),
    ("qwen3_next", "few", "torch_dist", True, True),
    ("glm4_moe", "few", "allgather", False, False),
    ("glm4_moe", "none", "shm", True, True),
    ("qwen3_5_moe", "first", "shm", True, True),
    ("eagle3", "all", "shm", True, False),
]
ATTENTIONS = ["flashinfer", pytest.param("triton", marks=pytest.mark.exhaustive)]
INTERPRETED = pytest.mark.skipif(
    COMPILED or find_spec("triton") is None, reason="needs Triton's interpreter, as without a GPU"
)


def two_ranks(
    checkpoint: Path, chunk: int, *, asynchronous: bool, ubatch: bool
) -> Callable[..., Any]:
    """Return a `rank_config` of sections on top of these."""
    scheduler = {"max_num_batched_tokens": chunk, "async_scheduling": asynchronous}
    overlap = {"mode": "on" if ubatch else "off", "min_decode_tokens": 3}
    return partial(
        rank_config, checkpoint, 2, scheduler=scheduler, overlap=overlap, cache={"num_blocks": 48}
    )


def assert_idle(results: list[RankResult], graphs: str, *, ubatch: bool) -> None:
    """The second rank has no sequences in most graphs, and the first has drafts that count."""
    assert merged(results).num_accepted_tokens > 0
    assert all((result.num_microbatched > 0) == ubatch for result in results)
    assert (results[1].gauges["graphs_idle"] > 3) == (graphs != "none")


@pytest.mark.parametrize(("family", "graphs", "all2all", "asynchronous", "ubatch"), CASES)
def test_drafts_beside_an_idle_rank(
    rank_pool: Any,
    tmp_path: Path,
    family: str,
    graphs: str,
    all2all: str,
    asynchronous: bool,
    ubatch: bool,
) -> None:
    most, chunk = 3, 32
    checkpoint, speculation = drafting(tmp_path, family)
    events = arrivals(random.Random(most), 2, 1, chunk)
    config = two_ranks(checkpoint, chunk, asynchronous=asynchronous, ubatch=ubatch)
    plain = merged(run_engines(rank_pool, config(), events))
    drafts = speculation | {"num_draft_tokens": most, "adaptive": False}
    sizes = graph_sizes(graphs, 16, chunk, most, adapters=False)
    results = run_engines(
        rank_pool,
        config(speculation=drafts, kernels={"all2all": all2all}),
        events,
        function=partial(run_rank_in_graphs, sizes, plain.tokens, most, False),
    )
    assert merged(results).tokens == plain.tokens and len(plain.tokens) == len(events)
    assert_idle(results, graphs, ubatch=ubatch)


@INTERPRETED
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    ("family", "graphs", "ubatch"), [("qwen3_next", "all", False), ("glm4_moe", "none", True)]
)
def test_kernels_of_gpus_beside_an_idle_rank(
    rank_pool: Any, tmp_path: Path, attention: str, family: str, graphs: str, ubatch: bool
) -> None:
    most, chunk, chance = 2, 12, random.Random(5)
    changes: dict[str, Any] = {"num_nextn_predict_layers": 1}
    kernels = {"all2all": "shm", "attention": attention, "grouped_gemm": "triton"}
    if family == "qwen3_next":
        changes = {"linear_value_head_dim": 16}  # the least that Triton's products take
        kernels["linear_attention"] = "triton"
    checkpoint = family_checkpoint(tmp_path, family, "tied", mtp=True, **changes)
    events = []
    for number, (step, length, count) in enumerate(((0, 5, 12), (1, 1, 6), (3, 20, 7), (9, 5, 4))):
        prompt = [chance.randrange(256) for _ in range(length)]
        request = make_request(str(number), prompt, max_tokens=count)
        events.append(Event(step, number == 3, request))
    config = two_ranks(checkpoint, chunk, asynchronous=True, ubatch=ubatch)
    plain = merged(run_engines(rank_pool, config(), events))
    results = run_engines(
        rank_pool,
        config(
            kernels=kernels,
            speculation={"method": "mtp", "num_draft_tokens": most, "adaptive": False},
        ),
        events,
        function=partial(
            run_rank_in_graphs,
            graph_sizes(graphs, 4, chunk, most, adapters=False),
            plain.tokens,
            most,
            True,
        ),
        timeout_s=250,
    )
    assert merged(results).tokens == plain.tokens and len(plain.tokens) == len(events)
    assert_idle(results, graphs, ubatch=ubatch)


def run_sharing(*arguments: Any) -> RankResult:
    """Run a rank as `run_rank_in_graphs`; to read shared blocks once always pays, and has graphs of any size."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(SharingCost, "on_gpu", lambda *_: ANY)
        patches.setattr(base, "LEAST_SHARED_DECODES", 1)
        return run_rank_in_graphs(*arguments)


@INTERPRETED
@pytest.mark.parametrize("ubatch", [False, True])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_shared_prefixes_of_one_rank(
    rank_pool: Any, tmp_path: Path, attention: str, ubatch: bool
) -> None:
    checkpoint = family_checkpoint(tmp_path, "qwen3_moe", "untied")
    events = []
    for number, (step, own, count) in enumerate(((0, 1, 9), (2, 3, 7), (2, 9, 6), (4, 1, 5))):
        prompt = [*range(40, 72), *range(number, number + own)]
        events.append(Event(step, 0, make_request(str(number), prompt, max_tokens=count)))
    config = two_ranks(checkpoint, 24, asynchronous=True, ubatch=ubatch)
    plain = merged(run_engines(rank_pool, config(kernels={"cascade": "off"}), events))
    results = run_engines(
        rank_pool,
        config(kernels={"all2all": "shm", "attention": attention}),
        events,
        function=partial(run_sharing, graph_sizes("all", 6, 24, 0, adapters=False), {}, 0, True),
        timeout_s=250,
    )
    assert merged(results).tokens == plain.tokens and len(plain.tokens) == len(events)
    assert results[0].shared_prefix_rows > 10 and not results[1].shared_prefix_rows
    assert results[1].gauges["graphs_idle"] > 3


def run_moving(*arguments: Any) -> RankResult:
    """Run a rank as `run_rank_in_graphs`, with experts that move."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(graph_ranks, "run_rank", moving_rank)
        return run_rank_in_graphs(*arguments)


@pytest.mark.parametrize(("graphs", "ubatch"), [("few", False), ("all", True)])
def test_experts_move(rank_pool: Any, tmp_path: Path, graphs: str, ubatch: bool) -> None:
    checkpoint, speculation = drafting(tmp_path, "glm4_moe")
    config = two_ranks(checkpoint, 32, asynchronous=True, ubatch=ubatch)
    plain = merged(run_engines(rank_pool, config(), moving_events()))
    results = run_engines(
        rank_pool,
        config(
            kernels={"all2all": "shm"},
            experts={"redundant_slots": 1, "rebalance": "auto"},
            speculation=speculation | {"num_draft_tokens": 2, "adaptive": False},
        ),
        moving_events(),
        function=partial(
            run_moving, graph_sizes(graphs, 16, 32, 2, adapters=False), plain.tokens, 2, False
        ),
    )
    found = merged(results)
    for tokens in (found.tokens, plain.tokens):
        tokens.pop("aborted", None)
    assert found.tokens == plain.tokens
    assert_idle(results, graphs, ubatch=ubatch)


@pytest.mark.parametrize("ubatch", [False, True])
def test_adapters_of_one_rank(rank_pool: Any, tmp_path: Path, ubatch: bool) -> None:
    base = family_checkpoint(tmp_path, "qwen3_next", "untied", mtp=True, vocab_size=VOCAB)
    models = made(base, ("q_proj", "o_proj", "in_proj_qkvz", *EXPERTS))
    config = with_adapters(
        models,
        2,
        2,
        lora={"targets": ["attention", "mlp", "experts"]},
        scheduler={"async_scheduling": True, "max_num_batched_tokens": 32},
        overlap={"mode": "on" if ubatch else "off"},
        speculation={"method": "mtp", "num_draft_tokens": 3, "adaptive": False},
    )
    events = [replace(event, rank=0) for event in adapter_events(2, VOCAB)]
    sizes = graph_sizes("all", 6, 32, 3, adapters=True)
    function = partial(run_rank_in_graphs, sizes, {}, 0, False)
    results = run_engines(rank_pool, config, events, function=function)
    assert tokens_of(results) == merged_models(rank_pool, models, VOCAB)
    assert_idle(results, "all", ubatch=ubatch)


def test_images_of_one_rank(rank_pool: Any, tmp_path: Path) -> None:
    path = image_checkpoint(tmp_path, "qwen3_5_moe", mtp=True)
    vision = load_model_config(path).vision
    assert vision is not None
    events = [replace(it, rank=0) for it in image_arrivals(image_prompts(vision, 6), 2)]
    plain = run_engines(rank_pool, rank_config(path, 2), events)
    config = two_ranks(path, 24, asynchronous=True, ubatch=True)
    results = run_engines(
        rank_pool,
        config(speculation={"method": "mtp", "num_draft_tokens": 2, "adaptive": False}),
        events,
        function=partial(
            run_rank_in_graphs,
            graph_sizes("all", 16, 24, 2, adapters=False),
            tokens_of(plain),
            2,
            False,
        ),
    )
    assert tokens_of(results) == tokens_of(plain)
    assert_idle(results, "all", ubatch=True)


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("graphs", ["all", "few"])
def test_all_ranks_learn_of_a_failure(
    rank_pool: Any, tmp_path: Path, where: str, graphs: str
) -> None:
    """The rank that fails takes part in the passes of the draft model; nobody waits for ever."""
    most, chunk = 3, 32
    checkpoint, speculation = drafting(tmp_path, "qwen3_next")
    events = arrivals(random.Random(most), 2, 2, chunk)
    config = two_ranks(checkpoint, chunk, asynchronous=True, ubatch=False)(
        kernels={"all2all": "shm"},
        speculation=speculation | {"num_draft_tokens": most, "adaptive": False},
    )
    sizes = graph_sizes(graphs, 16, chunk, most, adapters=False)
    with local_rendezvous() as rendezvous:
        found = rank_pool.outcomes(
            partial(run_failing_rank, where, sizes),
            2,
            *(config, rendezvous, events, False, 5000),
            with_group=False,
            timeout_s=60,
        )
    for outcome in found:
        assert isinstance(outcome, RankFailure) and outcome.type_name == "LockstepError"
        assert "rank 1: RuntimeError: no result" in str(outcome.cause)
