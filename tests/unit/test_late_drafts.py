"""Steps that are launched before the host has read their drafts: tokens are those of steps without drafts."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.host.host_copy import HostCopies
from tests.distributed.engine_harness import make_request, rank_config
from tests.late_drafts import right_drafts
from tests.unit.test_draft_engine import checkpoints, folder, run
from tests.unit.test_draft_graphs import DEPTH, SMALL, Captured
from tests.unit.test_speculation import new_tokens
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.runner.draft_passes import Drafted, DraftPasses
from workers.runner.draft_rows import DraftRows
from workers.runner.draft_store import DraftStore, StepDrafts
from workers.speculation.model_drafter import ModelDrafter
from workers.step.drafts import Drafts
from workers.step.forward_batch import ForwardBatch
from workers.step.grammar import Grammar
from workers.step.scheduled_batch import NO_DRAFT, ScheduledBatch
from workers.step.sequence import DECODE, PROMPT, VERIFY, InputBatch, ScheduledSequence, Sequence
from workers.wire.request import RequestOutput

__all__ = ["checkpoints", "folder"]  # fixtures

ASYNCHRONOUS = {"scheduler": {**SMALL["scheduler"], "async_scheduling": True}}


class Late:
    """Drafts that are right now and then, and that may not be read before the forward behind them is launched.

    num_unknown   sequences of forwards, launched before the host had read how many drafts of the step before are right
    num_behind    steps with drafts that the host read behind their draws and the passes of the draft model
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]]):
        self.num_late = self.early = self.num_unknown = self.num_behind = 0
        self._unread: StepDrafts | None = None
        run_passes, put = right_drafts(answers, DEPTH), DraftStore.put
        settle, resolve, read = DraftStore.settle, DraftStore.resolve, StepDrafts.read

        def run_right(passes: DraftPasses, scheduled: ScheduledBatch, *rest: Any) -> Drafted:
            found = run_passes(passes, scheduled, *rest)
            has_drafts = scheduled.draft_token_ids is not None
            self.num_behind += has_drafts and self._unread is not None
            return found

        def put_unread(store: DraftStore, *arguments: Any) -> StepDrafts:
            self._unread = put(store, *arguments)
            return self._unread

        def settle_now(store: DraftStore) -> None:
            self._unread = None
            settle(store)

        def count_late(
            store: DraftStore, scheduled: ScheduledBatch, batch: ForwardBatch
        ) -> ScheduledBatch:
            ids_L = scheduled.draft_token_ids
            if ids_L is not None:
                self.num_late += int(((ids_L < 0) & (ids_L != NO_DRAFT)).sum())
            return resolve(store, scheduled, batch)

        def read_later(step: StepDrafts, index: int, count: int) -> tuple[int, ...]:
            self.early += step is self._unread
            return read(step, index, count)

        are_unknown = InputBatch.has_unknown_lengths

        def count_unknown(table: InputBatch, rows: np.ndarray) -> np.ndarray:
            found = are_unknown(table, rows)
            self.num_unknown += int(found.sum())
            return found

        monkeypatch.setattr(InputBatch, "has_unknown_lengths", count_unknown)
        monkeypatch.setattr(DraftPasses, "run", run_right)
        monkeypatch.setattr(DraftStore, "put", put_unread)
        monkeypatch.setattr(DraftStore, "settle", settle_now)
        monkeypatch.setattr(DraftStore, "resolve", count_late)
        monkeypatch.setattr(StepDrafts, "read", read_later)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
@pytest.mark.parametrize(
    ("captured", "params"),
    [
        (False, {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}),
        (True, {}),
        (True, {"logprobs": 2, "repetition_penalty": 1.2}),
    ],
)
def test_drafts_are_read_behind_the_launch_that_verifies_them(
    checkpoints: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    captured: bool,
    params: dict[str, Any],
) -> None:
    sections = checkpoints[method]
    plain, _ = run({"model": sections["model"]}, params, **ASYNCHRONOUS)
    late = Late(monkeypatch, plain)
    speculation = sections["speculation"] | {"num_draft_tokens": DEPTH, "adaptive": False}
    graphs = Captured("all", monkeypatch) if captured else None
    prepare = (lambda epoch: None) if graphs is None else graphs
    found, counts = run(sections, params, prepare, speculation=speculation, **ASYNCHRONOUS)
    assert found == plain
    assert counts["accepted"] > 15 and late.num_late == counts["drafted"] and not late.early
    assert late.num_unknown > 15
    if params:
        assert not late.num_behind, "processors read drafts before the draws"
    else:
        assert late.num_behind > 5
    assert graphs is None or sum(graphs.replays.values()) > 12


def test_a_grammar_reads_its_drafts_before_the_launch() -> None:
    """Drafts that the grammar forbids are not verified, so the host needs their tokens."""
    drafter, seq = ModelDrafter(), Sequence.from_request(make_request("a", [1]))
    drafter.drafted(new_tokens(seq), Drafts([(-9, -10, -11)], lambda _: (3, 4, 5)))
    assert drafter.propose(seq, 2) == (-9, -10)
    seq.grammar = Grammar(matcher=None)
    assert drafter.propose(seq, 2) == (3, 4)


def test_a_sequence_that_a_step_leaves_out_keeps_its_drafts() -> None:
    """Drafts are found by row, of the last step in which the sequence had new tokens."""
    last_tokens, table = torch.zeros(4 * (1 + 2), dtype=torch.int64), InputBatch(4, 9)
    store = DraftStore(table, 2, last_tokens)

    def put(own: list[int], drafts: list[list[int]], ends: list[int]) -> Drafts:
        count, nothing = len(own), np.zeros(len(own), dtype=np.int64)
        place = np.arange(count), nothing + 1, np.arange(count), nothing, nothing
        rows = DraftRows(*place, np.array(own), np.array(ends), np.zeros_like(own))
        store.settle()
        return store.drafts_of(store.put(rows, torch.tensor(drafts), None), rows, nothing + 1)

    first = put([2, 0], [[5, 6], [7, -1]], [9, 1])
    second = put([1], [[8]], [9])
    assert [first.read(seq) for seq in (0, 1)] == [(5, 6), (7,)]
    references = [*first.references[0], *first.references[1], *second.references[0]]
    assert references == [-1 - 4 - 4, -1 - 4 - 5, -1 - 4, -1 - 4 - 2]
    assert last_tokens[[-1 - it for it in references]].tolist() == [5, 6, 7, 8]
    store.settle()
    ids = np.array([references[1], NO_DRAFT, 3, references[3], references[0]])
    batch: Any = SimpleNamespace(
        sampling_rows_cpu=np.array([2, 2, 3, 1, 2]),
        sampling_positions_cpu=np.array([5, 6, 1, 7, 4]),
    )
    scheduled = replace(ScheduledBatch.of([]), draft_token_ids=ids)
    found = store.resolve(scheduled, batch).draft_token_ids
    assert found is not None and found.tolist() == [6, NO_DRAFT, 3, 8, 5]
    assert table.token_ids[2].tolist() == [0, 0, 0, 0, 5, 6, 0, 0, 0]
    assert table.token_ids[1, 7] == 8 and not table.token_ids[3].any()


@pytest.mark.parametrize("captured", [False, True])
def test_tokens_stay_with_aborts_preemptions_and_other_samplers(
    checkpoints: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Random arrivals in a cache that is too small for all; an aborted request has the first tokens of its answer."""
    chance = random.Random(7)
    samplers = [
        {"stop_token_ids": frozenset(range(0, 256, 7))},  # an answer may end at any place
        *({"temperature": 0.7, "seed": 3}, {"frequency_penalty": 0.6}, {"logprobs": 1}),
    ]
    requests = {
        str(number): make_request(
            str(number),
            [chance.randrange(256) for _ in range(chance.choice([1, 9, 30, 60]))],
            max_tokens=chance.choice([3, 12, 25]),
            **samplers[number % 4],
        )
        for number in range(30)
    }
    arrivals = {name: 2 * int(name) for name in requests}
    aborts = {
        name: arrivals[name] + chance.randrange(1, 9) for name in requests if int(name) % 5 == 4
    }

    def tokens_of(
        sections: dict[str, Any], prepare: Any, aborted: dict[str, int]
    ) -> tuple[dict[str, list[int]], int]:
        found: dict[str, list[int]] = {name: [] for name in requests}

        def publish(_ingress: str, outputs: list[RequestOutput]) -> None:
            for output in outputs:
                found[output.request_id] += output.token_ids

        own = {**ASYNCHRONOUS, **sections, "cache": {"num_blocks": 14}}
        process = RankProcess(0, rank_config(Path(sections["model"]["path"]), 1, **own))
        try:
            epoch = Epoch(process, Rendezvous("127.0.0.1", 0, "alone"), 10)
            epoch.load()
            prepare(epoch)
            epoch.start_engine(publish, lambda step: None)
            ran, step = True, 0
            while ran or step <= max(arrivals.values()):
                for name, request in requests.items():
                    if arrivals[name] == step:
                        epoch.engine.submit(request)
                    if aborted.get(name) == step:
                        epoch.engine.abort(name)
                ran = epoch.engine.step().run
                step += 1
            epoch.scheduler.check_integrity()
            return found, epoch.scheduler.num_preemptions
        finally:
            process.close()

    sections = checkpoints["mtp"]
    plain, _ = tokens_of({"model": sections["model"]}, lambda epoch: None, {})
    late = Late(monkeypatch, plain)
    speculation = sections["speculation"] | {"num_draft_tokens": DEPTH}
    prepare = Captured("all", monkeypatch) if captured else lambda epoch: None
    sections = {**sections, "speculation": speculation | {"adaptive": False}}
    found, num_preemptions = tokens_of(sections, prepare, aborts)
    assert num_preemptions and late.num_late > 50 and not late.early
    assert late.num_unknown > 20
    for name, tokens in plain.items():
        assert found[name] == tokens[: len(found[name])], name
        assert name in aborts or len(found[name]) == len(tokens), name


@pytest.mark.parametrize("given", [False, True])
def test_the_device_keeps_the_last_token_that_counts(given: bool) -> None:
    """By the draws, or by given numbers; sequences without draws keep what they have."""
    seqs = [Sequence.from_request(make_request(str(number), [1])) for number in range(4)]
    for row, seq in enumerate(seqs):
        seq.row = row
    drafts = {0: (), 2: (5, 6), 3: (7, 8)}
    parts = [
        ScheduledSequence(
            seqs[row], VERIFY if tokens else DECODE, 1 + len(tokens), 1 + len(tokens), tokens
        )
        for row, tokens in drafts.items()
    ]
    scheduled = ScheduledBatch.of([*parts, ScheduledSequence(seqs[1], PROMPT, 3, 0)])
    assert [seq.row for seq in scheduled.seqs] == [0, 2, 3, 1]
    accepted = AcceptedDrafts(4, 2, torch.device("cpu"))
    assert accepted.last_tokens is not None
    accepted.last_tokens.fill_(9)
    batch: Any = SimpleNamespace(sampling_rows=torch.tensor([0, 2, 2, 2, 3, 3, 3]))
    token_L = torch.tensor([4, 5, 1, 2, 7, 8, 3])
    counts = np.array([1, 1, 2, 0]) if given else None
    accepted.enter(scheduled, batch, token_L, counts)
    assert accepted.last_tokens.tolist() == [4, 9, *([5, 8] if given else [1, 3]), *[9] * 8]
    accepted.copy(HostCopies(None))
    assert accepted.read(np.array([3, 2, 0])).tolist() == ([1, 2, 0] if given else [0, 1, 0])
    accepted.enter(
        ScheduledBatch.of(parts[:1]),
        SimpleNamespace(sampling_rows=torch.tensor([0])),
        torch.tensor([-3]),
        None,
    )
    assert accepted.last_tokens.tolist()[:2] == [0, 9]
