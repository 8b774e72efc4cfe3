"""KV blocks and states keep their contents from one epoch to the next, except what unfinished steps have written."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kernels.pending import Pending
from tests.unit.paged_model import VOCAB
from tests.unit.schedulers import make_scheduler
from tests.unit.test_engine_async import BLOCK, Run
from workers.kv_cache.caches import CacheMemory
from workers.kv_cache.manager import KVCacheManager
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.rank.epoch import Epoch, _Parts
from workers.step.step_output import StepOutput
from workers.step.step_sync import AbortedError
from workers.wire.request import EngineRequest, SamplingParams

NUM_BLOCKS = 22


def next_epoch(run: Run) -> Run:
    """End an epoch in the middle, as an abort does, and begin the next one over its blocks."""
    run.engine.discard_outputs()
    run.runner.model.spoil(len(run.engine._in_flight))
    run.engine.close()
    assert run.scheduler.cache.pool.usage == 0, "blocks leaked"
    kept = {"window": run.window, "snapshots": run.snapshots}
    return Run(run.asynchronous, run.num_blocks, before=run, **kept)


def new_snapshots(count: int | None) -> StateSnapshots | None:
    """Snapshots behind the slots of four rows."""
    return None if count is None else StateSnapshots(5, count, min_gain=BLOCK)


def requests_of(chance: random.Random) -> list[EngineRequest]:
    """Requests with few beginnings, so that many blocks are shared."""
    found = []
    for number in range(12):
        prompt = [(number % 2 + i) % VOCAB for i in range(chance.randint(1, 26))]
        params = SamplingParams(max_tokens=chance.randint(2, 12))
        name = {"request_id": str(number), "ingress_id": "i"}
        found.append(EngineRequest(**name, prompt_token_ids=prompt, params=params))
    return found


def submit(run: Run, request: EngineRequest, emitted: list[int]) -> None:
    fields = {**vars(request), "emitted_token_ids": list(emitted)}
    run.engine.submit(EngineRequest(**fields))


@pytest.mark.parametrize(
    ("asynchronous", "window", "snapshots"),
    [(False, None, None), (True, None, None), (True, 6, None), (False, None, 6), (True, None, 6)],
)
def test_requests_get_the_same_tokens_over_epochs_that_keep_their_blocks(
    asynchronous, window, snapshots
):
    hits = 0
    num_blocks = NUM_BLOCKS + (0 if window is None else 12)
    for seed in range(60):
        chance = random.Random(seed)
        requests = requests_of(chance)
        whole = Run(False, num_blocks, window=window)
        for request in requests:
            submit(whole, request, [])
        whole.finish()

        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        ended: set[str] = set()
        run = Run(asynchronous, num_blocks, window=window, snapshots=new_snapshots(snapshots))
        for _ in range(chance.randint(1, 6)):
            run.tokens, run.ends = tokens, dict.fromkeys(ended, "earlier")
            for request in requests:
                if request.request_id not in ended:
                    submit(run, request, tokens[request.request_id])
            for _ in range(chance.randint(0, 9)):
                run.engine.step()
            ended = set(run.ends)
            hits += run.scheduler.cache.num_hits
            run = next_epoch(run)
        run.tokens, run.ends = tokens, dict.fromkeys(ended, "earlier")
        for request in requests:
            if request.request_id not in ended:
                submit(run, request, tokens[request.request_id])
        run.finish()
        assert tokens == whole.tokens, f"seed {seed}"
    assert hits > (1000 if snapshots is None else 400)


def test_a_request_that_goes_on_finds_what_it_has_computed():
    run = Run(True, NUM_BLOCKS)
    run.submit("a", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], max_tokens=6)
    for _ in range(4):
        run.engine.step()
    emitted = run.tokens["a"]
    assert len(run.engine._in_flight) == 1 and len(emitted) == 3
    run = next_epoch(run)
    run.submit("a", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, *emitted], max_tokens=3)
    run.finish()
    assert run.scheduler.cache.num_hits == 3 * BLOCK


@pytest.mark.parametrize("copied", [False, True])
def test_a_snapshot_stays_over_epochs_if_it_was_made(copied: bool):
    run = Run(False, NUM_BLOCKS, snapshots=new_snapshots(2))
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 0]
    run.submit("a", prompt, max_tokens=6)
    run.engine.step()  # it ends where the state is worth keeping; the next step makes the copy
    if copied:
        run.engine.step()
    assert run.snapshots is not None and run.snapshots.num_kept == 1
    run = next_epoch(run)
    assert run.snapshots is not None and run.snapshots.num_kept == copied
    assert not run.snapshots.copies
    run.submit("a", prompt, max_tokens=3)
    run.finish()
    assert run.scheduler.cache.num_hits == 3 * BLOCK * copied


def test_a_warm_up_leaves_nothing_and_keeps_what_is_there():
    run = Run(False, NUM_BLOCKS)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    run.submit("a", prompt, max_tokens=1)
    run.finish()
    with run.scheduler.cache.off():
        run.submit("warm-up", [0] * 9, max_tokens=1)
        run.submit("equal", prompt, max_tokens=1)
        run.finish()
    hits = []
    for name, tokens in (("zeros", [0] * 9), ("again", prompt)):
        before = run.scheduler.cache.num_hits
        run.submit(name, tokens, max_tokens=1)
        run.finish()
        hits.append(run.scheduler.cache.num_hits - before)
    assert hits == [0, 2 * BLOCK]
    assert run.tokens["a"] == run.tokens["equal"] == run.tokens["again"]


def test_outputs_that_are_read_after_an_abort_are_not_published():
    """A kernel that waits for a dead peer ends by the abort with any result."""
    run = Run(True, NUM_BLOCKS)
    run.submit("a", [1, 2, 3], max_tokens=6)
    run.engine.step()
    run.engine.step()
    published = list(run.tokens["a"])
    (launched,) = run.engine._in_flight

    def end_by_abort() -> StepOutput:
        run.engine.discard_outputs()
        return StepOutput.of(launched.batch, [VOCAB + 1])

    run.engine._in_flight[0] = replace(launched, output=Pending(end_by_abort))
    with pytest.raises(AbortedError):
        run.engine.step()
    assert run.tokens["a"] == published and not run.engine.failed


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_abort_before_late_draws_forgets_what_their_step_was_to_write(num_steps):
    """One request draws late, while another computes its prompt in chunks of a block, which are found at once."""
    prompt = [number % VOCAB for number in range(22)]
    whole = Run(True, 64)
    whole.submit("b", prompt)
    whole.finish()
    run = Run(True, 64, {"max_num_batched_tokens": 1 + BLOCK})
    run.submit("a", [3], max_tokens=30, presence_penalty=0.5)
    run.engine.step()
    run.submit("b", prompt)
    for _ in range(num_steps):
        run.engine.step()
    (launched,) = run.engine._in_flight

    def end_by_abort() -> StepOutput:
        run.engine.discard_outputs()
        return launched.output.wait()

    run.engine._in_flight[0] = replace(launched, output=Pending(end_by_abort))
    with pytest.raises(AbortedError):
        run.engine.step()
    assert run.runner.late_draws == num_steps, "the last was aborted"
    run.runner.model.spoil(2)
    run.engine.close()
    again = Run(True, 64, before=run)
    again.submit("b", prompt)
    again.finish()
    assert again.tokens["b"] == whole.tokens["b"]


class Caches:
    """What an epoch leaves to the next one."""

    def __init__(self, run: Run):
        self.manager, self.kv_caches, self.num_blocks = run.scheduler.cache, [object()], NUM_BLOCKS

    forget_prefixes = CacheMemory.forget_prefixes

    def new_manager(self, num_blocks: int) -> KVCacheManager:
        return make_scheduler(num_blocks=num_blocks, snapshots=new_snapshots(3)).cache


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_are_dropped_after_an_error_of_their_own_bookkeeping(fails):
    run = Run(False, NUM_BLOCKS, snapshots=new_snapshots(3))
    run.submit("a", [1, 2, 3, 4, 5], max_tokens=6)
    run.engine.step()
    if fails:
        run.engine.fail(KeyError(7))
    epoch = object.__new__(Epoch)
    caches = Caches(run)
    epoch.process = SimpleNamespace(caches=caches)
    epoch._parts = _Parts(scheduler=run.scheduler, engine=run.engine)
    epoch._keep_blocks()
    assert (caches.manager is run.scheduler.cache) != fails
    assert (caches.manager.num_blocks, caches.manager.pool.usage) == (NUM_BLOCKS, 0)
