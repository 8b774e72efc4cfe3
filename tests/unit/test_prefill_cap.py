"""The cap of prompt tokens beside decodes: in the scheduler, over ranks in lockstep, and as it adapts to steps."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedulers import make_scheduler
from tests.unit.test_engine import CountingRunner, ThreadVotes
from tests.unit.test_scheduler import make, request, step
from workers.config import SchedulerConfig
from workers.engine.engine import Engine
from workers.engine.vote_transport import LocalVoteTransport
from workers.scheduler.prefill_cap import FLOOR_TOKENS, PrefillCap
from workers.step.sequence import DECODE
from workers.step.step_output import StepOutput
from workers.step.step_sync import PlanConfig
from workers.wire.request import EngineRequest, SamplingParams

MOST = 8192


def adapting(**limits) -> PrefillCap:
    return PrefillCap(SchedulerConfig(max_num_batched_tokens=MOST, **limits), block_size=16)


def test_prompts_get_the_cap_and_decodes_what_they_need():
    scheduler = make(max_num_batched_tokens=32)
    scheduler.add(request("early", 40, max_tokens=10))
    scheduler.add(request("late", 2, max_tokens=10))
    batch, _ = step(scheduler)
    assert batch.num_new_tokens.tolist() == [32], "no rank decodes: the whole budget"
    batch = scheduler.schedule(4)
    assert batch.num_new_tokens.tolist() == [4] and batch.prefill_tokens == 4


def test_a_capped_prompt_does_not_hold_back_the_decodes_behind_it():
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("late", 2, max_tokens=20, priority=1))
    step(scheduler)
    scheduler.add(request("first", 30))
    scheduler.add(request("second", 30))
    for _ in range(3):
        batch = scheduler.schedule(3)
        assert batch.num_new_tokens.tolist() == [1, 3] and batch.decodes_next
        scheduler.launched(batch)
        scheduler.commit(batch, StepOutput.of(batch, [9] * len(batch.logits_seqs)))
    assert [seq.request.request_id for seq in scheduler.waiting] == ["second"]


def test_a_prompt_leaves_the_decodes_behind_it_their_tokens():
    """Without a cap too, so that a long prompt of a higher priority does not stop the streams of other requests."""
    scheduler = make(max_num_batched_tokens=8)
    for name in ("b", "c"):
        scheduler.add(request(name, 2, max_tokens=20, priority=1))
    step(scheduler)
    scheduler.add(request("a", 2, max_tokens=20))
    step(scheduler)
    scheduler.add(request("long", 30))
    scheduler.add(request("longer", 30))
    for _ in range(6):
        batch, _ = step(scheduler)
        assert batch.num_new_tokens.tolist() == [1, 1, 1, 5]
    assert [seq.request.request_id for seq in scheduler.waiting] == ["longer"]


def test_prompts_that_are_not_split_have_no_cap():
    scheduler = make(max_num_batched_tokens=16, chunked_prefill=False, max_model_len=16)
    scheduler.add(request("a", 10))
    assert scheduler.schedule(4).num_new_tokens.tolist() == [10]


def test_a_rank_decodes_next_unless_its_tokens_are_the_last_ones():
    scheduler = make()
    scheduler.add(request("one", 6, max_tokens=1))
    assert not scheduler.schedule().decodes_next
    scheduler.add(request("two", 6, max_tokens=2))
    assert step(scheduler)[0].decodes_next
    assert not scheduler.schedule().decodes_next


arrivals = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2))


@settings(max_examples=150)
@given(
    st.lists(st.one_of(arrivals, st.just("step")), max_size=30),
    st.integers(1, 40),
    st.sampled_from([16, 200]),
)
def test_random_traffic_under_a_cap(events, cap, num_blocks):
    """No step has more prompt tokens than the cap, every decode runs in every step, and everything ends.

    A cap of 16 and more tokens is no limit. With 16 blocks sequences are preempted.
    """
    scheduler = make(num_blocks=num_blocks, max_num_batched_tokens=16)
    ended: set[str] = set()
    added = 0

    def run_step() -> None:
        decoding = {seq for seq in scheduler.running if seq.kind is DECODE}
        batch = scheduler.schedule(cap)
        assert batch.prefill_tokens <= cap
        assert {seq for seq in decoding if seq.row >= 0} <= set(batch.seqs)
        assert bool(batch.seqs) == scheduler.has_work
        scheduler.launched(batch)
        tokens = StepOutput.of(batch, [9] * len(batch.logits_seqs))
        for output in scheduler.commit(batch, tokens).outputs():
            ended.update([output.request_id] if output.finish_reason else [])

    for event in events:
        if event == "step":
            run_step()
        else:
            assert scheduler.add(request(str(added), *event[:2], priority=event[2])) is None
            added += 1
    for _ in range(2000):
        if not scheduler.has_work:
            break
        run_step()
    assert len(ended) == added and not scheduler.has_work


class Prompts(CountingRunner):
    """Notes the prompt tokens of each step and of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []

    def launch(self, batch, plan):
        self.steps.append((batch.num_single_rows, batch.prefill_tokens))
        return super().launch(batch, plan)


def engine_of(transport, cap: PrefillCap | None, asynchronous: bool) -> Engine:
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8)
    return Engine(
        make_scheduler(limits, num_blocks=256, max_model_len=512),
        Prompts(),
        transport,
        PlanConfig(equal_tokens=False),
        epoch=0,
        publish=lambda ingress, outputs: None,
        wake_peers=lambda number: None,
        asynchronous=asynchronous,
        prefill_cap=cap,
    )


def ask(name: str, length: int, max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(
        request_id=name, ingress_id="i", prompt_token_ids=list(range(length)), params=params
    )


def fixed(tokens: int) -> PrefillCap:
    limits = SchedulerConfig(max_num_batched_tokens=64, max_prefill_tokens_with_decodes=tokens)
    return PrefillCap(limits, 4)


def run_all(engines: list[Engine]) -> None:
    def run(engine: Engine) -> None:
        while engine.step().run:
            pass

    threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_without_decodes_is_capped_while_a_peer_decodes(asynchronous):
    """Rank 0 decodes 6 tokens; rank 1 computes a long prompt meanwhile, and has the whole budget afterwards.

    The cap of rank 0 holds, because rank 1 has no decodes; its own cap is another number.
    """
    votes = ThreadVotes(2)
    engines = [
        engine_of(votes.transport(rank), fixed(tokens), asynchronous)
        for rank, tokens in enumerate((10, 7))
    ]
    engines[0].submit(ask("short", 2, 7))
    engines[1].submit(ask("long", 300, 1))
    run_all(engines)
    prompts = [tokens for _, tokens in engines[1].runner.steps]
    capped = 6  # steps in which rank 0 decodes
    assert prompts[0] == 64 and prompts[1 : 1 + capped] == [10] * capped
    assert prompts[1 + capped] == 64 and sum(prompts) == 300
    assert [engine.stats.snapshot()["prefill_cap"] for engine in engines] == [10, 10]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_while_all_ranks_decode_the_lowest_cap_holds_on_all(asynchronous):
    votes = ThreadVotes(3)
    caps = (20, 9, 14)
    engines = [
        engine_of(votes.transport(rank), fixed(tokens), asynchronous)
        for rank, tokens in enumerate(caps)
    ]
    for engine in engines:
        engine.submit(ask("short", 2, 40))
        engine.submit(ask("long", 200, 1))
    run_all(engines)
    for engine in engines:
        steps = engine.runner.steps
        assert [tokens for decodes, tokens in steps if decodes][:10] == [9] * 10
        assert sum(tokens for _, tokens in steps) == 202


def test_the_engine_observes_gaps_of_steps_with_decodes_alone(monkeypatch):
    """Sleep between requests is no gap; neither is a step in which nothing decodes."""
    found: list[tuple[int, int]] = []
    cap = adapting(target_itl_ms=50)
    monkeypatch.setattr(cap, "observe", lambda gap, prompts, limit: found.append((prompts, limit)))
    engine = engine_of(LocalVoteTransport(), cap, asynchronous=False)
    for name in ("a", "b"):
        engine.submit(ask(name, 20, 3))
        while engine.step().run:
            pass
        engine._committed_at = 0.0  # as `_sleep` does
    assert found == [(0, FLOOR_TOKENS)] * 4, "two decodes of each request"


def test_the_scheduler_observes_every_gap_but_those_behind_sleep(monkeypatch):
    """Of steps with prompts too: the tower of images computes beside them."""
    engine = engine_of(LocalVoteTransport(), None, asynchronous=False)
    found: list[tuple[bool, int]] = []
    monkeypatch.setattr(
        engine.scheduler,
        "observe",
        lambda plan, gap: found.append((plan.decodes, plan.prefill_tokens)),
    )
    for name in ("a", "b"):
        engine.submit(ask(name, 65, 3))
        while engine.step().run:
            pass
        engine._committed_at = 0.0  # as `_sleep` does
    # The second prompt is cached but for its last token, so its first step has all of it.
    assert found == [(False, 1), (True, 0), (True, 0), (True, 0), (True, 0)]


def play(cap: PrefillCap, steps: int, seconds, seed: int = 0, backlog: float = 1.0) -> list[float]:
    """Run full steps, and now and then steps that only decode; return the gaps of steps with prompts."""
    chance = random.Random(seed)
    gaps = []
    for _ in range(steps):
        if chance.random() < 0.2:
            cap.observe(seconds(0, chance), 0, cap.tokens)
            continue
        now = cap.tokens
        tokens = now if chance.random() < backlog else chance.randint(2, now)
        gaps.append(seconds(tokens, chance))
        cap.observe(gaps[-1], tokens, now)
    return gaps


def linear(base_s: float, token_s: float, noise: float):
    return lambda tokens, chance: (base_s + token_s * tokens) * chance.lognormvariate(0, noise)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize(("base_s", "token_s"), [(0.008, 13e-6), (0.002, 80e-6)])
def test_the_cap_keeps_p99_of_the_gap_under_the_target(base_s, token_s, noise):
    """It uses most of the target, too."""
    cap = adapting(target_itl_ms=50)
    gaps = play(cap, 4000, linear(base_s, token_s, noise))[1000:]
    p99 = float(np.percentile(gaps, 99))
    assert 0.040 < p99 < 0.053, p99
    assert np.median(gaps) > 0.050 * (0.85 if noise < 0.05 else 0.7)


@pytest.mark.parametrize(("base_s", "token_s"), [(0.008, 13e-6), (0.03, 4e-6), (0.002, 80e-6)])
def test_the_cap_doubles_from_its_floor_without_a_gap_over_the_target(base_s, token_s):
    """Steps that only decode may take more than half of the target."""
    cap = adapting(target_itl_ms=50)
    assert cap.tokens == FLOOR_TOKENS
    cap.observe(base_s, 0, cap.tokens)
    gaps = play(cap, 15, linear(base_s, token_s, 0))
    assert max(gaps) <= cap.limit_s
    room = min(MOST, (cap.limit_s - base_s) / token_s)
    assert room / 2 <= cap.tokens <= room


def test_the_cap_falls_at_once_and_comes_back():
    cap = adapting(target_itl_ms=50)
    play(cap, 300, linear(0.002, 8e-6, 0))
    high = cap.tokens
    gaps = play(cap, 20, linear(0.002, 80e-6, 0))
    assert sum(gap > 0.0501 for gap in gaps) <= 5
    assert cap.tokens < high / 5
    low = cap.tokens
    play(cap, 1000, linear(0.002, 8e-6, 0))
    assert cap.tokens > 5 * low


def test_one_long_gap_halves_the_cap_at_most_and_small_steps_do_not_raise_it():
    cap = adapting(target_itl_ms=50)
    play(cap, 20, linear(0.002, 1e-7, 0))
    assert cap.tokens == MOST
    cap.observe(9.0, 100, cap.tokens)
    assert cap.tokens == MOST // 2
    for _ in range(500):
        cap.observe(0.001, 100, cap.tokens)
    assert cap.tokens == MOST // 2


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(1e-6, 100), st.integers(0, MOST)), max_size=60),
    st.floats(0.1, 1000),
    st.sampled_from([1, 100, 2048, MOST]),
)
def test_the_cap_stays_between_its_floor_and_the_budget(steps, target, budget):
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=1, target_itl_ms=target)
    cap = PrefillCap(config, block_size=16)
    for gap, tokens in steps:
        cap.observe(gap, tokens, cap.tokens)
        assert min(budget, FLOOR_TOKENS) <= cap.tokens <= budget


def test_slow_decodes_leave_prompts_half_of_the_time():
    """A machine that cannot decode within the target still computes prompts."""
    cap = adapting(target_itl_ms=10)
    gaps = play(cap, 3000, linear(0.1, 1e-4, 0.02))[1000:]
    assert 0.17 < np.median(gaps) < 0.21


def test_a_fixed_cap_stays_as_it_is():
    cap = adapting(max_prefill_tokens_with_decodes=300)
    play(cap, 100, linear(1.0, 1.0, 0))
    assert cap.tokens == 300
    assert adapting(max_prefill_tokens_with_decodes=10**9).tokens == MOST


def test_the_mean_step_without_prompts_counts_a_long_step_as_four():
    """The limit is twice the mean, because the target is shorter."""
    cap = adapting(target_itl_ms=1)
    cap.observe(0.1, 0, cap.tokens)
    assert cap.limit_s == pytest.approx(0.2)
    cap.observe(9.0, 0, cap.tokens)  # 0.1 + (0.4 - 0.1) / 16
    assert cap.limit_s == pytest.approx(2 * 0.11875)
    cap.observe(0.05, 0, cap.tokens)  # 0.11875 + (0.05 - 0.11875) / 16
    assert cap.limit_s == pytest.approx(2 * 0.114453125)


@pytest.mark.parametrize("limits", [{}, {"target_itl_ms": 50, "chunked_prefill": False}])
def test_without_a_target_or_without_chunks_prompts_have_no_limit(limits):
    assert PrefillCap.of(SchedulerConfig(**limits), 16) is None
    assert PrefillCap.of(SchedulerConfig(target_itl_ms=50), 16) is not None
    fixed = PrefillCap.of(SchedulerConfig(max_prefill_tokens_with_decodes=300), 16)
    assert fixed is not None and fixed.tokens == 300


@pytest.mark.parametrize("lag", [0, 1])
def test_a_rank_with_shorter_gaps_follows_the_lowest_cap(lag):
    """When the rank with the lowest cap has no more decodes, the cap of the group does not jump.

    lag   steps that were decided before a gap is observed
    """
    fast, slow = adapting(target_itl_ms=50), adapting(target_itl_ms=50)
    caps = [fast.tokens] * (1 + lag)
    for _ in range(2000):
        now = caps.pop(0)
        fast.observe(0.003 + 70e-6 * now, now, now)
        slow.observe(0.004 + 80e-6 * now, now, now)
        caps.append(min(fast.tokens, slow.tokens))
    assert 400 < slow.tokens < 600
    assert slow.tokens <= fast.tokens < 1.15 * slow.tokens
