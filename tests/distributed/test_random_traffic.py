"""Many steps of random arrivals, aborts and idle ranks: no hang, and everybody gets what they would get alone."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from workers.wire.request import EngineRequest

NUM_RANKS, MAX_LEN = 4, 192


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("traffic") / "model"
    make_checkpoint(
        path, num_layers=2, hidden_size=64, num_experts=6, num_experts_per_tok=2, head_dim=32
    )
    return path


def random_request(chance: random.Random, name: str) -> EngineRequest:
    prompt = [chance.randrange(256) for _ in range(chance.choice([1, 2, 7, 30, 90]))]
    params = {"max_tokens": chance.randint(1, 12)}
    if chance.random() < 0.5:
        params.update(temperature=0.9, top_k=20, seed=chance.randrange(2**63))
    if chance.random() < 0.2:
        params["stop_token_ids"] = frozenset(range(0, 256, 5))
    return make_request(name, prompt, **params)


def random_traffic(
    chance: random.Random, num_steps: int, num_ranks: int = NUM_RANKS
) -> list[Event]:
    """Bursts and quiet spells; some ranks get nothing for hundreds of steps."""
    events, step, number = [], 0, 0
    while step < num_steps:
        awake = chance.sample(range(num_ranks), chance.randint(1, num_ranks))
        for _ in range(chance.randint(1, 30)):
            step += chance.choice([0, 0, 0, 1, 3])
            rank = chance.choice(awake)
            events.append(Event(step, rank, random_request(chance, str(number))))
            if chance.random() < 0.2:
                events.append(Event(step + chance.randint(0, 12), rank, abort=str(number)))
            number += 1
        step += chance.choice([0, 20, 60])
    return sorted(events, key=lambda event: event.step)


@pytest.mark.parametrize(
    ("all2all", "asynchronous", "ubatch", "num_steps"),
    [
        *(
            ("shm", True, True, 240),
            ("shm", False, False, 240),
            ("torch_dist", True, False, 120),
            ("torch_dist", False, True, 120),
            ("allgather", True, True, 300),
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("shm", True, True, 700),
                ("shm", False, False, 600),
                # More ranks than cores wait for each other's sockets: a step takes 15 ms.
                ("torch_dist", True, False, 300),
                ("torch_dist", False, True, 300),
            )
        ),
    ],
)
def test_everybody_gets_what_they_would_get_alone(
    rank_pool, checkpoint, all2all, asynchronous, ubatch, num_steps
):
    events = random_traffic(random.Random(all2all), num_steps)
    limits = {"model": {"max_model_len": 112}, "cache": {"num_blocks": 15, "block_size": 8}}
    config = rank_config(
        checkpoint,
        NUM_RANKS,
        kernels={"all2all": all2all},
        scheduler={
            "max_num_seqs": 6,
            "max_num_batched_tokens": 48,
            "async_scheduling": asynchronous,
        },
        overlap={"mode": "on" if ubatch else "off", "min_decode_tokens": 3},
        **limits,
    )
    results = run_engines(rank_pool, config, events, max_steps=2 * num_steps, timeout_s=240)
    assert len({result.num_steps for result in results}) == 1
    assert sum(result.num_preemptions for result in results) > 0
    for result in results:
        assert (num_steps // 20 < result.num_microbatched < result.num_steps) == ubatch

    alone = rank_config(checkpoint, 1, scheduler={"max_num_seqs": 1}, **limits)
    compare_with_alone(rank_pool, alone, events, results)


def compare_with_alone(pool, alone, events, results) -> None:
    """Compare the tokens of all requests that were not aborted with those of `alone`, which runs one after another."""
    finished = {name for result in results for name in result.reasons}
    wanted = [e for e in events if e.request is not None and e.request.request_id in finished]
    compare(events, results, answers_alone(pool, alone, wanted))


def answers_alone(pool, alone, events) -> dict[str, list[int]]:
    """Return the tokens of all requests by `alone`, without aborts."""
    one_by_one = [Event(0, 0, event.request) for event in events if event.request is not None]
    (expected,) = run_engines(pool, alone, one_by_one, max_steps=50_000, timeout_s=240)
    return expected.tokens


def compare(events, results, answers) -> None:
    """Compare the tokens of all requests that were not aborted, and the first tokens of the others, with answers."""
    requests = {event.request.request_id for event in events if event.request is not None}
    aborted = {event.abort for event in events if event.abort is not None}
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    finished = {name for result in results for name in result.reasons}
    assert requests - aborted <= finished, "a request that nobody aborted did not finish"
    assert not any(result.errors for result in results)
    different = [name for name in finished if tokens[name] != answers[name]]
    assert not different, f"{len(different)} of {len(finished)} differ, such as {different[:3]}"


@pytest.mark.parametrize(
    ("num_ranks", "chunk", "asynchronous", "ubatch", "num_steps"),
    [
        *((1, 3, True, False, 150), (1, 16, False, False, 80), (2, 4096, True, True, 40)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (1, 16, False, False, 200),
                (2, 4096, True, True, 100),
            )
        ),
    ],
)
def test_states_of_linear_attention(
    rank_pool, tmp_path, num_ranks, chunk, asynchronous, ubatch, num_steps
):
    states_under_traffic(rank_pool, tmp_path, num_ranks, chunk, asynchronous, ubatch, num_steps)


def states_under_traffic(
    pool, folder: Path, num_ranks: int, chunk: int, asynchronous: bool, ubatch: bool, num_steps: int
) -> None:
    """Shared prompts, preemptions, aborts and snapshots; the harness spoils every slot that no forward may read.

    chunk   most tokens of a step; requests come as often as it lets a rank serve them
    """
    checkpoint = make_checkpoint(
        folder, family="qwen3_next", num_layers=3, hidden_size=64, num_experts=6, vocab_size=320
    )
    chance = random.Random(num_steps + chunk)
    shared = [[chance.randrange(256) for _ in range(150)] for _ in range(3)]
    events, taken = [], min(1.0, chunk / 16)
    for event in random_traffic(chance, num_steps, num_ranks):
        if event.request is not None:
            if chance.random() > taken:
                continue
            if chance.random() < 0.6:
                begin = chance.choice(shared)[: chance.choice([90, 150])]
                prompt = begin + event.request.prompt_token_ids[:30]
                event = replace(event, request=replace(event.request, prompt_token_ids=prompt))
        events.append(event)
    limits = {"model": {"max_model_len": MAX_LEN}}
    config = rank_config(
        checkpoint,
        num_ranks,
        scheduler={
            "max_num_seqs": 6,
            "max_num_batched_tokens": chunk,
            "async_scheduling": asynchronous,
        },
        cache={"num_blocks": 40, "block_size": 8, "state_snapshots": 4},
        overlap={"mode": "on" if ubatch else "off", "min_decode_tokens": 3},
        **limits,
    )
    results = run_engines(pool, config, events, max_steps=60 * num_steps, timeout_s=900)
    if chunk >= 16 and num_steps > 1000:
        assert sum(result.num_preemptions for result in results) > 0
    assert sum(result.states_restored for result in results) > 0
    assert all((result.num_microbatched > 0) == ubatch for result in results)
    alone = rank_config(
        checkpoint, 1, scheduler={"max_num_seqs": 1}, cache={"prefix_caching": False}, **limits
    )
    compare_with_alone(pool, alone, events, results)
