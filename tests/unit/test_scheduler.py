"""The scheduler alone: examples, then random arrivals and aborts against its invariants."""

import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedulers import group_of, make_scheduler
from workers.config import SchedulerConfig
from workers.kv_cache.block_groups import FullGroup
from workers.kv_cache.block_pool import chain_keys, root_key
from workers.scheduler.scheduler import Scheduler
from workers.step.step_output import StepOutput
from workers.step.step_sync import ForwardMode
from workers.wire.request import EngineRequest, SamplingParams

BLOCK = 4


def make(num_blocks=64, max_model_len=64, **limits) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits}
    config = SchedulerConfig(**limits)
    return make_scheduler(
        config, num_blocks=num_blocks, block_size=BLOCK, max_model_len=max_model_len
    )


def request(
    name: str, length: int, max_tokens: int = 4, stop=(), first=None, priority: int = 0
) -> EngineRequest:
    """Prompts of different names share nothing, unless they are told to begin with the same token."""
    first = zlib.crc32(name.encode()) % 100_000 if first is None else first
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset(stop))
    return EngineRequest(
        request_id=name,
        ingress_id="i",
        prompt_token_ids=list(range(first, first + length)),
        params=params,
        priority=priority,
    )


def step(scheduler: Scheduler, token: int = 9):
    batch = scheduler.schedule()
    scheduler.launched(batch)
    return batch, scheduler.commit(
        batch, StepOutput.of(batch, [token] * len(batch.logits_seqs))
    ).outputs()


def test_prefill_then_decode_until_max_tokens():
    scheduler = make()
    assert scheduler.add(request("a", 6, max_tokens=2)) is None
    batch, outputs = step(scheduler)
    assert batch.forward_mode == ForwardMode.EXTEND and batch.num_tokens == 6
    assert outputs[0].token_ids == [9] and outputs[0].finish_reason is None
    batch, outputs = step(scheduler)
    assert batch.forward_mode == ForwardMode.DECODE and outputs[0].finish_reason == "length"
    assert not scheduler.has_work and scheduler.cache.pool.usage == 0
    assert scheduler.schedule().forward_mode == ForwardMode.IDLE


def test_stop_token_ends_and_is_included():
    scheduler = make()
    scheduler.add(request("a", 3, stop=[9]))
    _, outputs = step(scheduler)
    assert outputs[0].finish_reason == "stop" and outputs[0].token_ids == [9]


def test_model_length_ends_a_request():
    scheduler = make(max_model_len=8)
    scheduler.add(request("a", 6, max_tokens=100))
    reasons = [step(scheduler)[1][0].finish_reason for _ in range(2)]
    assert reasons == [None, "length"]


def test_chunked_prefill_respects_the_budget_and_mixes_with_decodes():
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("short", 2, max_tokens=10))
    step(scheduler)
    scheduler.add(request("long", 20))
    batch, outputs = step(scheduler)
    assert batch.forward_mode == ForwardMode.MIXED and batch.num_new_tokens.tolist() == [1, 7]
    assert [o.request_id for o in outputs] == ["short"]
    assert step(scheduler)[0].num_new_tokens.tolist() == [1, 7]
    batch, outputs = step(scheduler)
    assert batch.num_new_tokens.tolist() == [1, 6]
    assert [o.request_id for o in outputs] == ["short", "long"]


def test_without_chunking_a_prompt_waits_for_a_whole_budget():
    scheduler = make(max_num_batched_tokens=16, chunked_prefill=False, max_model_len=16)
    scheduler.add(request("a", 10))
    scheduler.add(request("b", 10))
    assert step(scheduler)[0].num_new_tokens.tolist() == [10]
    assert step(scheduler)[0].num_new_tokens.tolist() == [1, 10]


def test_youngest_is_preempted_and_comes_back_with_its_tokens():
    scheduler = make(num_blocks=4)
    scheduler.add(request("old", 7, max_tokens=8))
    scheduler.add(request("young", 7, max_tokens=8))
    done = {}
    for _ in range(60):
        if not scheduler.has_work:
            break
        for output in step(scheduler)[1]:
            done.setdefault(output.request_id, []).extend(output.token_ids)
    assert scheduler.num_preemptions > 0
    assert {name: len(tokens) for name, tokens in done.items()} == {"old": 8, "young": 8}


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    scheduler = make(num_blocks=2)
    assert "needs 3 KV blocks; this rank has 2" in scheduler.add(request("a", 6, max_tokens=6))
    assert "must be 1 to 63" in scheduler.add(request("b", 64))
    assert "prompt of 0 tokens" in scheduler.add(request("c", 0))
    assert not scheduler.has_work


def test_invalid_logits_end_only_that_request():
    scheduler = make()
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    batch = scheduler.schedule()
    scheduler.launched(batch)
    outputs = scheduler.commit(batch, StepOutput.of(batch, [-1, 5])).outputs()
    assert outputs[0].finish_reason == "error" and "NaN" in outputs[0].error
    assert outputs[1].token_ids == [5] and scheduler.has_work


def test_abort_anywhere_frees_everything():
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("running", 5))
    scheduler.add(request("waiting", 5))
    step(scheduler)
    assert scheduler.abort("waiting") and scheduler.abort("running")
    assert scheduler.abort("running") is None and scheduler.abort("unknown") is None
    assert not scheduler.has_work and scheduler.cache.pool.usage == 0


def test_a_close_with_two_uncommitted_steps_forgets_the_blocks_of_both():
    """The first commit registers the block of the second step too, because that step is launched."""
    scheduler = make(max_num_batched_tokens=BLOCK)
    scheduler.add(request("a", 13, first=0))
    launched = []
    for number in range(3):
        launched.append(scheduler.schedule())
        scheduler.launched(launched[-1])
        if number == 1:
            scheduler.commit(launched[0], StepOutput.of(launched[0], []))
    keys = chain_keys(root_key(""), list(range(13)), BLOCK)
    assert len(scheduler.cache.pool.find(keys)) == 2
    scheduler.close(launched[1:])
    assert len(scheduler.cache.pool.find(keys)) == 1


def names(seqs) -> list[str]:
    return [seq.request.request_id for seq in seqs]


def test_smaller_priorities_start_first_then_who_came_first():
    scheduler = make(max_num_seqs=2)
    for name, priority in [("a", 5), ("b", 0), ("c", -1), ("d", 0), ("e", 5), ("f", -1)]:
        scheduler.add(request(name, 3, max_tokens=1, priority=priority))
    order = []
    while scheduler.has_work:
        order += names(step(scheduler)[0].seqs)
    assert order == ["c", "f", "b", "d", "a", "e"]


def test_who_waits_takes_nothing_from_who_runs():
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("late", 3, max_tokens=2, priority=9))
    step(scheduler)
    scheduler.add(request("urgent", 3, priority=-9))
    assert names(step(scheduler)[0].seqs) == ["late"]
    assert names(step(scheduler)[0].seqs) == ["urgent"]


def test_the_last_in_order_is_preempted_and_returns_to_its_place():
    scheduler = make(num_blocks=6)
    scheduler.add(request("least", 7, max_tokens=12, priority=2))
    step(scheduler)
    scheduler.add(request("first", 7, max_tokens=12, priority=1))
    scheduler.add(request("second", 7, max_tokens=12, priority=1))
    step(scheduler)
    assert names(scheduler.running) == ["first", "second", "least"]
    scheduler.add(request("later", 7, max_tokens=12, priority=2))
    scheduler.add(request("urgent", 7, max_tokens=12, priority=0))
    while not scheduler.num_preemptions:
        step(scheduler)
    assert names(scheduler.running) == ["first", "second"]
    assert names(scheduler.waiting) == ["urgent", "least", "later"]
    while scheduler.num_preemptions < 2:
        step(scheduler)
    assert names(scheduler.running) == ["first"]
    assert names(scheduler.waiting) == ["urgent", "second", "least", "later"]
    for _ in range(100):
        step(scheduler)
    assert not scheduler.has_work


def test_an_urgent_prompt_gets_the_budget_that_decodes_leave():
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("slow", 12, priority=1))
    step(scheduler)
    scheduler.add(request("urgent", 16, priority=0))
    assert step(scheduler)[0].num_new_tokens.tolist() == [4, 4]
    batch, _ = step(scheduler)
    assert names(batch.seqs) == ["slow", "urgent"]
    assert batch.num_new_tokens.tolist() == [1, 7]


def check_invariants(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    for seqs in (scheduler.running, scheduler.waiting):
        orders = [seq.order for seq in seqs]
        assert orders == sorted(set(orders))
    rows = [seq.row for seq in scheduler.running]
    assert len(rows) == len(set(rows)) and min(rows, default=0) >= 0
    assert all(seq.row == -1 for seq in scheduler.waiting)
    table, full = scheduler.table, group_of(scheduler.cache, FullGroup)
    for seq in scheduler.running:
        blocks = full.held[seq].ids
        assert table.token_ids[seq.row, : seq.num_tokens].tolist() == seq.token_ids
        assert full.table[seq.row, : len(blocks)].tolist() == blocks
        assert table.num_computed_tokens[seq.row] == seq.num_computed_tokens <= seq.num_tokens
        assert len(blocks) * BLOCK >= seq.num_computed_tokens


# Every third prompt begins like the others of its kind, and some are more urgent.
arrivals = st.tuples(st.integers(1, 30), st.integers(1, 12))
events = st.lists(st.one_of(arrivals, st.just("step"), st.integers(0, 20)), max_size=60)


@settings(max_examples=150)
@given(events, st.integers(11, 24), st.integers(1, 4), st.sampled_from([5, 16, 64]), st.booleans())
def test_random_traffic(events, num_blocks, max_num_seqs, budget, chunked):
    """Every request ends exactly once with the tokens it asked for, or was aborted; nothing leaks."""
    scheduler = make(
        num_blocks,
        max_model_len=44,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, 44) if not chunked else budget,
        chunked_prefill=chunked,
    )
    wanted: dict[str, int] = {}
    got: dict[str, int] = {}

    def run_step():
        batch = scheduler.schedule()
        assert batch.num_tokens <= max(budget, 0 if chunked else 44)
        assert bool(batch.seqs) == scheduler.has_work  # whoever has work makes progress
        new = batch.num_new_tokens.tolist()
        assert new == sorted(new, key=lambda n: n != 1) and batch.num_single_rows == new.count(1)
        scheduler.launched(batch)
        for output in scheduler.commit(
            batch, StepOutput.of(batch, [7] * len(batch.logits_seqs))
        ).outputs():
            got[output.request_id] = got.get(output.request_id, 0) + 1
            if output.finish_reason:
                assert got.pop(output.request_id) == wanted.pop(output.request_id)
        check_invariants(scheduler)

    for number, event in enumerate(events):
        if event == "step":
            run_step()
        elif isinstance(event, int):
            scheduler.abort(str(event))
            wanted.pop(str(event), None)
            got.pop(str(event), None)
        else:
            length, max_tokens = event
            new = request(str(number), length, max_tokens, first=number % 3, priority=number % 4)
            if scheduler.add(new) is None:
                wanted[str(number)] = max_tokens
        check_invariants(scheduler)
    for _ in range(2000):
        if not scheduler.has_work:
            break
        run_step()
    assert not scheduler.has_work and not wanted
    assert scheduler.cache.pool.usage == 0
