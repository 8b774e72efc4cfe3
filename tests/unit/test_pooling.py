"""Requests that end with a vector: in the scheduler, in the head that pools, on the wire, and for the client."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.schedulers import make_scheduler
from workers.config import SchedulerConfig
from workers.pooling.head import PoolingHead
from workers.scheduler.scheduler import Scheduler
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput
from workers.wire import inbox, token_stream
from workers.wire.request import (
    NO_OUTPUT,
    EngineRequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    merge,
)

VECTOR = np.arange(3, dtype=np.float32)


def pooling_request(name: str, prompt: Any, rows: Any = "last", **params: Any) -> EngineRequest:
    prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
    pooling = PoolingParams(rows=rows, **params)
    return EngineRequest(
        request_id=name, ingress_id="i", prompt_token_ids=prompt, params=NO_OUTPUT, pooling=pooling
    )


def text_request(name: str, prompt: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        ingress_id="i",
        prompt_token_ids=list(range(100, 100 + prompt)),
        params=SamplingParams(max_tokens=max_tokens),
    )


def launch(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    scheduler.launched(batch)
    return batch


def commit(
    scheduler: Scheduler, batch: ScheduledBatch, vector: np.ndarray = VECTOR
) -> list[RequestOutput]:
    vectors = [vector if part.ends_vector else None for part in batch.parts]
    output = StepOutput.of(batch, [9] * len(batch.logits_seqs), vectors=vectors)
    return scheduler.commit(batch, output).outputs()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("last", [range(0), range(0), range(1, 2)]),
        ("mean", [range(8), range(8), range(2)]),
        ("cls", [range(1), range(0), range(0)]),
    ],
)
def test_a_prompt_gives_its_rows_chunk_by_chunk_and_ends_with_its_vector(rows, expected):
    scheduler = make_scheduler(SchedulerConfig(max_num_batched_tokens=8))
    assert scheduler.add(pooling_request("a", 18, rows)) is None
    found: list[list[range]] = []
    while scheduler.has_work:
        batch = launch(scheduler)
        assert not len(batch.logits_seqs) and not batch.decodes_next
        found.append(list(batch.parts[0].hidden_rows))
        outputs = commit(scheduler, batch)
    assert found == [list(it) for it in expected]
    assert outputs[0].finish_reason == "stop" and outputs[0].vector is VECTOR
    assert scheduler.cache.pool.usage == 0


def test_a_launched_vector_is_waited_for_and_not_computed_again():
    scheduler = make_scheduler()
    scheduler.add(pooling_request("a", 10))
    first = launch(scheduler)
    assert not launch(scheduler).parts, "an engine that launches ahead has nothing to do"
    assert [output.request_id for output in commit(scheduler, first)] == ["a"]
    assert not scheduler.has_work


def test_an_abort_in_flight_drops_the_vector():
    scheduler = make_scheduler()
    scheduler.add(pooling_request("a", 10))
    batch = launch(scheduler)
    scheduler.abort("a")
    assert commit(scheduler, batch) == []
    scheduler.check_integrity()


def test_only_the_last_row_takes_a_prefix_from_the_cache():
    scheduler = make_scheduler()
    for number, rows in enumerate(("mean", "last", "mean", "cls")):
        scheduler.add(pooling_request(str(number), 10, rows))
        batch = launch(scheduler)
        (output,) = commit(scheduler, batch)
        assert output.num_cached_tokens == (8 if rows == "last" else 0)
        assert batch.num_tokens == (2 if rows == "last" else 10)
    assert scheduler.cache.num_queries == 10, "prompts without a lookup do not count"


def test_a_preempted_prompt_gives_all_its_rows_again():
    limits = SchedulerConfig(max_num_batched_tokens=3, max_num_seqs=2)
    scheduler = make_scheduler(limits, num_blocks=6, prefix_caching=False)
    scheduler.add(text_request("text", 4, 20))
    scheduler.add(pooling_request("vector", 16, "mean"))
    rows: list[int] = []
    while scheduler.has_work and "vector" in scheduler._by_id:
        batch = launch(scheduler)
        for part in batch.parts:
            if part.seq.request.request_id == "vector":
                start = part.seq.num_computed_tokens - part.num_new
                rows = [] if start == 0 else rows
                rows += [start + row for row in part.hidden_rows]
        commit(scheduler, batch)
        scheduler.check_integrity()
    assert rows == list(range(16))
    assert scheduler.num_preemptions, "the text grew into the blocks of the prompt"


def test_the_longest_prompt_has_no_room_for_a_token():
    scheduler = make_scheduler()
    assert scheduler.add(pooling_request("a", 64)) is None
    assert scheduler.add(pooling_request("b", 65)) == "prompt of 65 tokens; must be 1 to 64"


def test_a_vector_that_is_not_finite_ends_its_request_alone():
    scheduler = make_scheduler()
    scheduler.add(pooling_request("a", 10))
    (output,) = commit(scheduler, launch(scheduler), np.array([1, np.nan], dtype=np.float32))
    assert output.finish_reason == "error" and "NaN" in (output.error or "")
    assert output.vector is None and scheduler.num_invalid == 1
    scheduler.add(pooling_request("b", 10))
    (output,) = commit(scheduler, launch(scheduler))
    assert output.num_cached_tokens == 0, "the blocks of the request before are forgotten"


class Doubling:
    """A model whose final norm doubles, with two classes."""

    dtype = torch.float32

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden

    def score(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled[:, :2] + 1


def run_head(head: PoolingHead, scheduler: Scheduler, hidden: torch.Tensor) -> list[Any]:
    """The vectors of the next step, which is launched and not committed."""
    batch = scheduler.schedule()
    starts = np.concatenate([[0], np.cumsum(batch.num_new_tokens)]).astype(np.int32)
    for seq in batch.admitted:
        head.admit(seq)
    found = head.collect(batch, starts, hidden)
    scheduler.launched(batch)
    return [] if found is None else found.lists(len(batch.parts))


def test_the_head_pools_prompts_of_all_kinds_in_one_step():
    scheduler = make_scheduler(SchedulerConfig(max_num_batched_tokens=64))
    kinds: list[tuple[Any, dict[str, Any]]] = [
        ("last", {}),
        ("mean", {"dimensions": 2}),
        ("cls", {"output": "classes"}),
        ("mean", {"normalize": True}),
    ]
    for number, (rows, params) in enumerate(kinds):
        prompt = [100 * number + index for index in range(2 + number)]
        scheduler.add(pooling_request(str(number), prompt, rows, **params))
    scheduler.add(text_request("text", 3, 2))
    lengths = [2, 3, 4, 5, 3]
    hidden = torch.randn(sum(lengths) + 3, 4, generator=torch.Generator().manual_seed(0))
    hidden[-3:] = float("nan")  # padding
    vectors = run_head(PoolingHead(Doubling()), scheduler, hidden)
    parts = iter(np.split(2 * hidden.numpy(), np.cumsum(lengths)))
    np.testing.assert_allclose(vectors[0], next(parts)[-1])
    np.testing.assert_allclose(vectors[1], next(parts).mean(0)[:2], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(vectors[2], next(parts)[0, :2] + 1)
    mean = next(parts).mean(0)
    np.testing.assert_allclose(vectors[3], mean / np.linalg.norm(mean), rtol=1e-6, atol=1e-6)
    assert vectors[4] is None


def test_the_head_keeps_sums_over_chunks_until_another_sequence_moves_in():
    scheduler = make_scheduler(SchedulerConfig(max_num_batched_tokens=5, max_num_seqs=1))
    head = PoolingHead(Doubling())
    scheduler.add(pooling_request("aborted", 8, "mean"))
    assert run_head(head, scheduler, torch.full((5, 3), 1000.0)) == []
    scheduler.abort("aborted")
    scheduler.add(pooling_request("a", 12, "mean"))
    hidden, vectors = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), []
    for start in (0, 5, 10):
        vectors = run_head(head, scheduler, hidden[start : start + 5])
    np.testing.assert_allclose(vectors[0], 2 * hidden.mean(0).numpy(), rtol=1e-5, atol=1e-6)


def test_requests_and_vectors_pass_the_wire():
    request = pooling_request("a", 3, "cls", token_ids=(4, 5), output="tokens")
    fields = json.loads(json.dumps(inbox._fields(request), default=list))
    assert inbox._request(fields) == request
    delivered: list[list[RequestOutput]] = []

    class Listener:
        def deliver(self, rank: int, load: int, outputs: list[RequestOutput]) -> None:
            delivered.append(outputs)

    sent: list[bytes] = []
    sender = token_stream.TokenSender.__new__(token_stream.TokenSender)
    sender._sender, sender._epoch = (
        type("Sink", (), {"send": lambda _, data: sent.append(data)})(),
        1,
    )
    outputs = [
        RequestOutput("a", [], "stop", num_cached_tokens=2, vector=VECTOR),
        RequestOutput("b", [7, 8]),
        RequestOutput("c", [], "stop", vector=np.array([0.1], dtype=np.float64)),
    ]
    sender.send(0, 3, outputs)
    receiver = token_stream.TokenReceiver("127.0.0.1", 1)
    try:
        receiver._listener = Listener()
        assert receiver._take(0, sent[0])
        text, _, _ = sent[0].partition(b"\n")
        for broken in (text, sent[0][:-4], sent[0] + b"1234", sent[0][:-1]):
            assert not receiver._take(0, broken), "a vector is not whole"
    finally:
        receiver.close()
    assert delivered == [outputs]
    assert delivered[0][0].vector.tolist() == [0, 1, 2] and delivered[0][1].vector is None
    assert delivered[0][2].vector.dtype == np.float32
    begun = RequestOutput("a", [])
    assert merge([begun, outputs[0]]).vector is VECTOR
