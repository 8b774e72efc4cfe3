"""Whole engines with prefix caching on and off: the same tokens for everybody, in a cache that is always too small."""

import random
from pathlib import Path

import pytest

from cluster.client.router import Router
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import (
    Event,
    RankResult,
    make_request,
    rank_config,
    run_engines,
)
from tests.distributed.rank_pool import RankPool

BLOCK, NUM_BLOCKS, NUM_REQUESTS = 8, 30, 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prefixes") / "model"
    make_checkpoint(
        path, num_layers=2, hidden_size=64, num_experts=6, num_experts_per_tok=2, head_dim=32
    )
    return path


def shared_traffic(chance: random.Random, num_ranks: int) -> list[Event]:
    """Prompts that begin like others and go their own way anywhere, in a block or at its end; some are aborted."""
    stems = [[chance.randrange(256) for _ in range(80)] for _ in range(4)]
    events, step = [], 0
    for number in range(NUM_REQUESTS):
        step += chance.choice([0, 0, 1, 3])
        rank = chance.randrange(num_ranks)
        own = [chance.randrange(256) for _ in range(chance.choice([0, 1, 5, 30]))]
        prompt = chance.choice(stems)[: chance.choice([1, 8, 16, 33, 64, 80])] + own
        params = {"max_tokens": chance.randint(1, 24)}
        if chance.random() < 0.4:
            params.update(temperature=0.8, seed=chance.randrange(2**63))
        events.append(Event(step, rank, make_request(str(number), prompt, **params)))
        if chance.random() < 0.15:
            events.append(Event(step + chance.randint(0, 15), rank, abort=str(number)))
    return sorted(events, key=lambda event: event.step)


def serve(
    pool: RankPool,
    checkpoint: Path,
    num_ranks: int,
    events: list[Event],
    caching: bool,
    dtype: str = "auto",
) -> list[RankResult]:
    config = rank_config(
        checkpoint,
        num_ranks,
        model={"max_model_len": 160},
        cache={
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK,
            "prefix_caching": caching,
            "dtype": dtype,
        },
        scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 48},
    )
    return run_engines(pool, config, events)


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_everybody_gets_the_same_tokens_with_and_without(rank_pool, checkpoint, num_ranks):
    events = shared_traffic(random.Random(num_ranks), num_ranks)
    aborted = {event.abort for event in events if event.abort is not None}
    cached = serve(rank_pool, checkpoint, num_ranks, events, caching=True)
    plain = serve(rank_pool, checkpoint, num_ranks, events, caching=False)
    assert len({result.num_steps for result in cached}) == 1, "ranks ran different steps"
    tokens = [
        {name: ids for result in results for name, ids in result.tokens.items() if name in reasons}
        for results in (cached, plain)
        for reasons in [{name for result in results for name in result.reasons} - aborted]
    ]
    assert len(tokens[0]) == NUM_REQUESTS - len(aborted)
    assert tokens[0] == tokens[1]
    assert all(result.prefix_cache_hits > 0 for result in cached)
    assert not any(result.prefix_cache_hits for result in plain)
    for results in (cached, plain):
        assert sum(result.num_preemptions for result in results) > 0
    # Told once for each request that had a first token.
    told = sum(sum(result.cached_tokens.values()) for result in cached)
    hits = sum(result.prefix_cache_hits for result in cached)
    assert 0 < told <= hits and told % BLOCK == 0


def test_the_next_turn_of_a_chat_computes_only_what_is_new(rank_pool, checkpoint):
    first = list(range(100))
    config = rank_config(checkpoint, 1, cache={"num_blocks": 64, "block_size": BLOCK})
    (alone,) = run_engines(rank_pool, config, [Event(0, 0, make_request("a", first))])
    second = [*first, *alone.tokens["a"], 7, 7]
    turns = [Event(0, 0, make_request("a", first)), Event(40, 0, make_request("b", second))]
    (chat,) = run_engines(rank_pool, config, turns)
    (fresh,) = run_engines(rank_pool, config, [Event(0, 0, make_request("b", second))])
    assert chat.tokens["b"] == fresh.tokens["b"]
    assert chat.cached_tokens == {"a": 0, "b": 112} and fresh.cached_tokens == {"b": 0}


def test_an_fp8_cache_gives_one_answer_from_any_cache(rank_pool, checkpoint):
    """Chunks, preemption and the prefix cache change sums by 1e-6, which turns a rounding to e4m3 now and then."""
    events = shared_traffic(random.Random(5), 2)
    cached, plain, exact = (
        serve(rank_pool, checkpoint, 2, events, caching=caching, dtype=dtype)
        for caching, dtype in ((True, "fp8"), (False, "fp8"), (True, "auto"))
    )
    assert all(result.prefix_cache_hits > 0 for result in cached)
    assert sum(result.num_preemptions for result in (*cached, *plain)) > 0
    tokens = [
        {name: ids for result in results for name, ids in result.tokens.items()}
        for results in (cached, plain, exact)
    ]
    ended = {name for result in plain for name in result.reasons}
    ended -= {event.abort for event in events if event.abort is not None}
    same, changed = (
        sum(tokens[0][name] == other[name] for name in ended) / len(ended) for other in tokens[1:]
    )
    assert same >= 0.95
    assert changed < 1, "the cache was not in FP8"
    again = serve(rank_pool, checkpoint, 2, events, caching=True, dtype="fp8")
    assert [result.tokens for result in again] == [result.tokens for result in cached]


def in_turns(lead: float, prompts: list[list[int]], answers: dict[str, list[int]]) -> list[Event]:
    """Two turns of all sessions, on the ranks that the router of an ingress picks."""
    router = Router([2], cache_tokens=1600, lead=lead)
    events = []
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            answer = answers.get(str(number), [])
            tokens = [*prompt, *answer, *prompt[:30]] if turn else prompt
            pick = router.pick(tokens, 20)
            pick.load.release(len(tokens) + 20)
            router.keep(pick.load, pick.tail, [] if turn else answer)
            name = f"{number} again" if turn else str(number)
            request = make_request(name, tokens, max_tokens=20)
            events.append(Event(100 * turn, pick.load.place[1], request))
    return events


def test_a_session_finds_its_prefix_on_the_rank_that_the_router_keeps_it_on(rank_pool, checkpoint):
    chance = random.Random(1)
    prompts = [[chance.randrange(256) for _ in range(70)] for _ in range(5)]
    config = rank_config(checkpoint, 2, cache={"num_blocks": 200, "block_size": BLOCK})

    def run(lead: float, answers: dict[str, list[int]]) -> tuple[dict[str, list[int]], list[int]]:
        results = run_engines(rank_pool, config, in_turns(lead, prompts, answers))
        tokens = {name: ids for result in results for name, ids in result.tokens.items()}
        cached = {name: n for result in results for name, n in result.cached_tokens.items()}
        return tokens, [cached[f"{number} again"] for number in range(len(prompts))]

    answers, _ = run(0, {})
    sticky, cached = run(8, answers)
    spread, found = run(0, answers)
    assert sticky == spread
    assert cached == [88] * 5, "the prompt of 70 tokens and its answer of 20, in whole blocks"
    assert sum(found) < sum(cached)
