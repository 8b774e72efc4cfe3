"""Whole engines whose steps run in ubatches: the tokens of transformers, and errors that hang nobody."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.engine_harness import RankResult, make_request, rank_config, run_engines
from tests.distributed.rank_pool import RankPool
from tests.distributed.reference import (
    NUM_PROMPTS,
    Reference,
    arrivals,
    check,
    generate_references,
    write_checkpoint,
)
from workers.config import RankConfig
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import Rendezvous

ALWAYS = {"mode": "on"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ubatch") / "model")


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    return generate_references(checkpoint)


@pytest.mark.parametrize(
    ("ranks", "all2all", "num_ubatches", "asynchronous"),
    [
        (1, "local", 2, False),
        (2, "shm", 2, True),
        (2, "torch_dist", 3, False),
        (3, "allgather", 2, False),
        (4, "hierarchical", 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (4, "torch_dist", 2, True),
                (4, "shm", 2, False),
                (4, "allgather", 4, True),
                (2, "hierarchical", 3, False),
            )
        ),
    ],
)
def test_tokens_and_logits_equal_transformers(
    rank_pool, checkpoint, references, ranks, all2all, num_ubatches, asynchronous
):
    config = rank_config(
        checkpoint,
        ranks,
        kernels={"all2all": all2all},
        scheduler={"max_num_batched_tokens": 128, "async_scheduling": asynchronous},
        overlap={**ALWAYS, "num_ubatches": num_ubatches},
    )
    results = run_engines(
        rank_pool, config, arrivals(references, NUM_PROMPTS, ranks), keep_logits=not asynchronous
    )
    check(references, results, NUM_PROMPTS)
    for result in results:
        assert 0 < result.num_microbatched <= result.num_steps
    assert len({result.num_microbatched for result in results}) == 1, "ranks cut different steps"


def test_an_idle_rank_runs_along_in_ubatches(rank_pool, checkpoint, references):
    config = rank_config(checkpoint, 2, kernels={"all2all": "torch_dist"}, overlap=ALWAYS)
    results = run_engines(rank_pool, config, arrivals(references[5:6], 1, 2), keep_logits=True)
    check(references[5:6], results, 1)
    # its prompt; a decode of one row is not cut
    assert [result.num_microbatched > 0 for result in results] == [True, True]


def test_a_measured_threshold_is_the_same_on_all_ranks(
    rank_pool, checkpoint, references, tmp_path, monkeypatch
):
    config = rank_config(
        checkpoint,
        2,
        kernels={"all2all": "allgather"},
        scheduler={"max_num_batched_tokens": 128},
        overlap={"mode": "auto"},
    )
    for _ in range(2):  # the second start takes over what the first has measured
        results = run_engines(rank_pool, config, arrivals(references, 6, 2))
        check(references, results, 6)
        assert len({result.num_microbatched for result in results}) == 1


@dataclass
class Outcome:
    """What became of one rank: the error it met, seconds until it had it, and what its second life served."""

    error: str
    seconds: float
    later: RankResult


class Failing:
    """An expert product that fails in one layer of one ubatch, and knows when."""

    def __init__(self, inner, calls: int):
        self.inner, self.calls, self.failed_at = inner, calls, 0.0

    def __call__(self, *inputs):
        self.calls -= 1
        if self.calls < 0:
            self.failed_at = time.monotonic()
            raise RuntimeError("the product failed")
        return self.inner(*inputs)


def _fail_and_live_again(
    rank_index: int,
    num_ranks: int,
    info,
    config: RankConfig,
    rendezvous: list[Rendezvous],
    failing_ubatch: int,
    prompt: list[int],
) -> Outcome:
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess

    process = RankProcess(rank_index, config)
    epoch = Epoch(process, rendezvous[0], 30)
    epoch.load()
    epoch.start_engine(lambda ingress, outputs: None, lambda step: None)
    ubatches = epoch.engine.runner.ubatches
    layer = ubatches._models[failing_ubatch].layers[1][1]
    failing = layer.grouped_gemm = Failing(layer.grouped_gemm, 2)
    if rank_index != 1:
        failing.calls = 10**9
    for index in range(3):  # decodes of one row are not cut
        epoch.engine.submit(make_request(f"first {index}", prompt, max_tokens=50))
    started = time.monotonic()
    try:
        for _ in range(50):
            epoch.engine.step()
        raise AssertionError("no error")
    except (RuntimeError, OSError) as error:
        seconds = time.monotonic() - (failing.failed_at or started)
        told = f"{type(error).__name__}: {error}"
    epoch.abort()
    epoch.close()
    later = RankResult()

    def publish(ingress: str, outputs: list) -> None:
        for output in outputs:
            later.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    second = Epoch(process, rendezvous[1], 30)
    second.load()
    second.start_engine(publish, lambda step: None)
    try:
        second.engine.submit(make_request("second", prompt, max_tokens=12))
        while second.engine.step().run:
            pass
    finally:
        process.close()
    return Outcome(told, seconds, later)


@pytest.mark.parametrize(
    ("all2all", "failing_ubatch"),
    [
        *(("torch_dist", 0), ("allgather", 1), ("shm", 0)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("torch_dist", 1), ("allgather", 0), ("shm", 1))
        ),
    ],
)
def test_an_error_in_a_ubatch_stops_all_and_the_next_group_serves(
    rank_pool: RankPool, checkpoint, references, all2all, failing_ubatch
):
    config = rank_config(checkpoint, 2, kernels={"all2all": all2all}, overlap=ALWAYS)
    prompt = references[6].prompt
    with local_rendezvous() as first, local_rendezvous() as second:
        arguments = (config, [first, second], failing_ubatch, prompt)
        outcomes = rank_pool.run(_fail_and_live_again, 2, *arguments, with_group=False)
    assert outcomes[1].error == "RuntimeError: the product failed"
    assert outcomes[1].seconds < config.vote_timeout_s, "the error did not surface at once"
    assert outcomes[0].seconds < config.vote_timeout_s, "the other rank did not notice"
    for outcome in outcomes:
        assert outcome.later.tokens == {"second": references[6].tokens}
