"""Steps launched before the last one's tokens are known give what steps in turn give, whatever happens meanwhile."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pending import Pending
from tests.unit.paged_model import VOCAB, PagedModel
from tests.unit.schedulers import make_scheduler
from workers.config import SchedulerConfig
from workers.engine.engine import Engine
from workers.engine.vote_transport import LocalVoteTransport
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.scheduler.scheduler import Scheduler
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput
from workers.step.step_sync import LockstepError, PlanConfig
from workers.step.vote import Vote, columns_of
from workers.wire.request import EngineRequest, SamplingParams

BLOCK, MAX_LEN = 4, 40


class PagedRunner:
    """Runs a PagedModel; `waited` outputs were read. Marks as the sampler does who needs its last token."""

    def __init__(self, scheduler: Scheduler, invalid: frozenset[str] = frozenset()):
        self.model = PagedModel(scheduler)
        self.launched: list[ScheduledBatch] = []
        self.admitted: list[str] = []
        self.most_outstanding = self._outstanding = self.waits = self.late_draws = 0
        self._invalid = invalid

    def launch(self, batch: ScheduledBatch, plan, before_draws=None) -> Pending[StepOutput]:
        self.launched.append(batch)
        self._outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self._outstanding)
        for seq in batch.admitted:
            assert seq in batch.seqs
            self.admitted.append(seq.request.request_id)
            seq.needs_last_token = seq.request.params.presence_penalty > 0
        tokens = self.model.execute(batch)
        assert (before_draws is not None) == any(
            seq.num_pending and seq.needs_last_token for seq in batch.seqs
        )
        if before_draws is not None:
            before_draws()
            self.late_draws += 1
            assert self._outstanding == 1, "the step before was not read"
        names = [batch.seqs[index].request.request_id for index in batch.logits_seqs]
        tokens = [-1 if name in self._invalid else t for name, t in zip(names, tokens, strict=True)]

        def read() -> StepOutput:
            self._outstanding -= 1
            self.waits += 1
            return StepOutput.of(batch, tokens)

        return Pending(read)


@dataclass
class Run:
    """An engine stepped by hand."""

    asynchronous: bool
    num_blocks: int = 64
    limits: dict = field(default_factory=dict)
    caching: bool = True
    invalid: frozenset[str] = frozenset()
    before: "Run | None" = None  # the epoch with the same cache
    window: int | None = None
    snapshots: StateSnapshots | None = None

    def __post_init__(self):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **self.limits}
        self.scheduler = make_scheduler(
            SchedulerConfig(**limits),
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            cache=self.before and self.before.scheduler.cache,
            prefix_caching=self.caching,
            window=self.window,
            snapshots=self.snapshots,
        )
        self.runner = PagedRunner(self.scheduler, self.invalid)
        if self.before is not None:
            self.runner.model = PagedModel(self.scheduler, self.before.runner.model)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.engine = Engine(
            self.scheduler,
            self.runner,
            LocalVoteTransport(),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=lambda step: None,
            asynchronous=self.asynchronous,
        )

    def submit(self, name: str, prompt: list[int], priority: int = 0, **params) -> None:
        values = {"max_tokens": 6, **params}
        self.engine.submit(
            EngineRequest(
                request_id=name,
                ingress_id="i",
                prompt_token_ids=prompt,
                params=SamplingParams(**values),
                priority=priority,
            )
        )

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.step().run:
                assert not self.scheduler.has_work and not self.engine._in_flight
                assert self.scheduler.cache.pool.usage == 0, "blocks leaked"
                return
        raise AssertionError("it never ends")

    def _publish(self, _ingress_id, outputs):
        for output in outputs:
            if output.begins:
                continue
            assert output.request_id not in self.ends, "an answer after the last one"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason


# Prompts begin alike, so that blocks are shared; few tokens, so that stop tokens come.
arrivals = st.tuples(
    st.integers(1, 30),
    st.integers(1, 10),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    st.integers(0, 2),
)
events = st.lists(st.one_of(arrivals, st.just("step"), st.integers(0, 12)), max_size=40)


def play(run: Run, happenings) -> set[str]:
    """Submit, step and abort; the names of those aborted."""
    aborted = set()
    for number, event in enumerate(happenings):
        if event == "step":
            run.engine.step()
        elif isinstance(event, int):
            run.engine.abort(str(event))
            aborted.add(str(event))
        else:
            length, max_tokens, stops, penalty, priority = event
            prompt = [(number % 2 + i) % VOCAB for i in range(length)]
            run.submit(
                str(number),
                prompt,
                priority,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                presence_penalty=penalty,
            )
    run.finish()
    return aborted


@settings(max_examples=200)
@given(
    events,
    st.integers(11, 24),
    st.integers(1, 4),
    st.sampled_from([3, 16]),
    st.booleans(),
    st.sampled_from([None, 2, 7]),
)
def test_random_traffic(happenings, num_blocks, max_num_seqs, budget, caching, window):
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    num_blocks += 0 if window is None else 11
    runs = [Run(a, num_blocks, limits, caching, window=window) for a in (False, True)]
    aborted, _ = (play(run, happenings) for run in runs)
    for name in runs[0].tokens.keys() | runs[1].tokens.keys():
        expected, found = (run.tokens.get(name, []) for run in runs)
        if name in aborted:
            shorter = min(len(expected), len(found))
            assert expected[:shorter] == found[:shorter]
        else:
            assert expected == found and runs[0].ends[name] == runs[1].ends[name]


def test_two_thousand_random_steps():
    """Long enough for many preemptions, each with a token under way."""
    chance = random.Random(3)
    happenings = []
    for number in range(700):
        stops = frozenset(chance.sample(range(VOCAB), chance.choice([0, 0, 1])))
        happenings.append((chance.randint(1, 24), chance.randint(1, 15), stops, 0.0, number % 3))
        happenings += ["step"] * chance.choice([0, 2, 8])
        if chance.random() < 0.1:
            happenings.append(chance.randrange(number + 1))
    runs = [Run(a, 14) for a in (False, True)]
    aborted, _ = (play(run, happenings) for run in runs)
    assert min(run.scheduler.num_preemptions for run in runs) > 50
    assert len(runs[1].runner.launched) > 2000
    assert [run.runner.most_outstanding for run in runs] == [1, 2]
    for name in runs[0].tokens.keys() - aborted:
        assert runs[0].tokens[name] == runs[1].tokens[name], name


def test_the_next_step_is_launched_before_the_tokens_are_read():
    run = Run(True)
    run.submit("a", [1, 2, 3], max_tokens=3)
    run.engine.step()
    assert not run.tokens
    run.engine.step()
    assert len(run.tokens["a"]) == 1 and len(run.runner.launched) == 2
    run.engine.step()
    assert len(run.tokens["a"]) == 2
    # The third is its last, whichever it is: no surplus step, its token comes at once.
    run.engine.step()
    assert run.ends == {"a": "length"} and len(run.runner.launched) == 3


class BusyPeer(LocalVoteTransport):
    """Another rank decodes in every step."""

    def __init__(self, has_work: bool = True):
        super().__init__()
        self.has_work, self.votes = has_work, 0

    def all_gather(self, row):
        self.votes += 1
        peer = Vote(epoch=0, step=columns_of(row[None])["step"][0], has_work=self.has_work)
        return np.stack([row, replace(peer, num_tokens=int(self.has_work)).row()])


def test_a_rank_without_requests_votes_before_its_last_step_has_ended():
    run = Run(True)
    run.engine._vote_transport = peer = BusyPeer()
    for _ in range(4):
        before = run.runner.waits
        run.engine._schedule()
        assert run.runner.waits == before, "the vote waited for a step"
        run.engine.step()
    assert peer.votes == len(run.runner.launched) == 4 and len(run.engine._in_flight) == 1
    run.submit("a", [1, 2, 3], max_tokens=2)
    for _ in range(4):
        run.engine.step()
    assert run.ends == {"a": "length"} and len(run.tokens["a"]) == 2
    peer.has_work = False
    run.finish()


def test_a_surplus_token_is_thrown_away():
    probe = Run(False)
    probe.submit("a", [1, 2, 3])
    probe.finish()
    stop = probe.tokens["a"][1]
    run = Run(True)
    run.submit("a", [1, 2, 3], stop_token_ids=frozenset([stop]))
    run.finish()
    expected = probe.tokens["a"][: probe.tokens["a"].index(stop) + 1]
    assert run.tokens["a"] == expected and run.ends == {"a": "stop"}
    assert len(run.runner.launched) == len(expected) + 1
    assert run.engine.stats.snapshot()["generation_tokens"] == len(expected)


def test_a_draw_that_needs_the_token_before_it_waits_behind_the_forward():
    """No vote waits for it: the step before is read between the forward and the draws."""
    run = Run(True)
    run.engine._vote_transport = peer = BusyPeer()
    run.submit("a", [1, 2, 3], presence_penalty=0.5)
    run.submit("b", [3, 2, 1])
    for _ in range(5):
        before = run.runner.waits
        run.engine._schedule()
        assert run.runner.waits == before, "the vote waited for a step"
        run.engine.step()
    assert run.runner.late_draws == 4 and run.runner.most_outstanding == 2
    peer.has_work = False
    run.finish()
    assert len(run.tokens["a"]) == len(run.tokens["b"]) == 6


def test_a_failure_before_late_draws_is_voted(monkeypatch):
    run = Run(True)
    run.submit("a", [1, 2, 3], presence_penalty=0.5)
    run.engine.step()
    monkeypatch.setattr(run.scheduler, "commit", lambda *_: 1 / 0)
    run.engine.step()
    assert run.engine.failed
    with pytest.raises(LockstepError, match="division by zero"):
        run.engine.step()


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_abort_under_way_leaves_nothing(steps):
    run = Run(True)
    run.submit("a", [1, 2, 3])
    run.submit("b", [3, 2, 1])
    for _ in range(steps):
        run.engine.step()
    run.engine.abort("a")
    seen = len(run.tokens.get("a", []))
    run.finish()
    assert len(run.tokens.get("a", [])) == seen and len(run.tokens["b"]) == 6


@pytest.mark.parametrize("asynchronous", [False, True])
def test_invalid_logits_end_only_that_request(asynchronous):
    run = Run(asynchronous, invalid=frozenset(["bad"]))
    run.submit("bad", list(range(6)))
    run.submit("good", list(range(6)), max_tokens=4)
    run.finish()
    assert run.ends == {"bad": "error", "good": "length"} and len(run.tokens["good"]) == 4
