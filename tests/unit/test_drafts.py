"""Drafts made by hand, from the scheduler's data to the commit: tokens with drafts equal tokens without."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import make_request, rank_config
from tests.unit.schedulers import make_scheduler
from tests.unit.test_scheduler import make, names, request, step
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.sampling.no_token import INVALID_LOGITS
from workers.speculation.speculator import make_speculator
from workers.speculation_config import SpeculationConfig
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import DECODE, PROMPT, VERIFY, ScheduledSequence, Sequence
from workers.step.step_output import StepOutput
from workers.wire.request import RequestOutput, TokenLogprobs

Drafts = Callable[[Sequence], list[int]]
SALTS = map(str, itertools.count())
PROMPTS = {"a": [5, 6, 7], "b": list(range(100, 140)), "c": [200] * 17}


class Served:
    """An engine stepped by hand; `propose` drafts tokens for each sequence that takes some."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.outputs: dict[str, list[RequestOutput]] = {}
        epoch.start_engine(self._publish, lambda step: None)

    def _publish(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, prompts: dict[str, list[int]], propose: Drafts, salt: str, **params) -> None:
        self.outputs.clear()
        scheduler, finished = self.epoch.scheduler, 0
        for name, prompt in prompts.items():
            asked = make_request(name, prompt, **params)
            self.epoch.engine.submit(replace(asked, cache_salt=salt))
        while True:
            for seq in scheduler.running:
                if seq.takes_drafts and seq.num_output_tokens:
                    seq.propose(propose(seq))
            if not self.epoch.engine.step().run and finished == len(prompts):
                break
            self.epoch.process.grammars.wait()
            finished = sum(it[-1].finish_reason is not None for it in self.outputs.values())
            for seq in scheduler.running:
                computed = scheduler.table.num_computed_tokens[seq.row]
                assert computed == seq.num_computed_tokens < seq.num_tokens
                assert not seq.num_pending and not seq.draft_token_ids
            scheduler.check_integrity()
        assert scheduler.cache.pool.usage == 0

    def logprobs(self) -> list[float]:
        return [
            entry.logprob
            for name in sorted(self.outputs)
            for output in self.outputs[name]
            for entry in output.logprobs or ()
        ]

    def tokens(self) -> dict[str, list[int]]:
        return {
            name: [token for output in outputs for token in output.token_ids]
            for name, outputs in self.outputs.items()
        }


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    checkpoint = make_checkpoint(
        folder, num_layers=2, hidden_size=32, num_experts=4, num_experts_per_tok=2
    )
    config = rank_config(checkpoint, 1, scheduler={"max_num_batched_tokens": 32})
    epoch = Epoch(RankProcess(0, config), Rendezvous("127.0.0.1", 0, "alone"), 10)
    epoch.load()
    yield Served(epoch)
    epoch.process.close()


def no_drafts(_seq: Sequence) -> list[int]:
    return []


def drafts_from(tokens: dict[str, list[int]], wrong_every: int = 0) -> Drafts:
    """Draft four of the known tokens; each `wrong_every`-th token of the output is drafted wrong."""

    def propose(seq: Sequence) -> list[int]:
        name, start = seq.request.request_id, seq.num_output_tokens
        if name == "c":
            return []
        known = enumerate(tokens[name][start : start + 4], start)
        return [t ^ 1 if wrong_every and at % wrong_every == 0 else t for at, t in known]

    return propose


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 1}])
@pytest.mark.parametrize(("wrong_every", "most_outputs"), [(0, 5), (3, 9), (1, 20)])
def test_tokens_with_drafts_equal_tokens_without(served, params, wrong_every, most_outputs):
    """With prompts in chunks and a sequence without drafts beside them; later prompts find the blocks."""
    params = {"max_tokens": 20, **params}
    served.run(PROMPTS, no_drafts, next(SALTS), **params)
    expected = served.tokens()
    salt = next(SALTS)
    served.run(PROMPTS, drafts_from(expected, wrong_every), salt, **params)
    assert served.tokens() == expected
    for name in "ab":
        sizes = [len(output.token_ids) for output in served.outputs[name] if output.token_ids]
        assert len(sizes) <= most_outputs and (wrong_every != 1 or set(sizes) == {1})
        for output in served.outputs[name][1:] if "logprobs" in params else ():
            assert len(output.logprobs) == len(output.token_ids)
    prompts = {name: PROMPTS[name] + expected[name][:-1] for name in PROMPTS}
    served.run(prompts, no_drafts, salt, **params | {"max_tokens": 1})
    assert {name: tokens[-1] for name, tokens in expected.items()} == {
        name: tokens[0] for name, tokens in served.tokens().items()
    }
    assert served.outputs["b"][-1].num_cached_tokens == 48


def test_a_stop_token_among_accepted_drafts_ends_the_output(served):
    served.run(PROMPTS, no_drafts, next(SALTS), max_tokens=12)
    expected = served.tokens()["b"]
    stop = expected[3]
    end = expected.index(stop) + 1
    drafts = drafts_from({"b": expected})
    params = {"max_tokens": 12, "stop_token_ids": frozenset([stop])}
    served.run({"b": PROMPTS["b"]}, drafts, next(SALTS), **params)
    assert served.tokens()["b"] == expected[:end]
    assert [output.finish_reason for output in served.outputs["b"]][-1] == "stop"


PROCESSORS = {
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 256, 2))},
    "bias": {"logit_bias": ((7, 2.0), (200, 2.0)), "logprobs": 2},
    "allowed": {"allowed_token_ids": tuple(range(0, 256, 3)), "prompt_logprobs": 1},
    "grammar": {
        "grammar": "start: /([a-d]{2}[0-9]){5,9}[e-z]x/",
        "stop_token_ids": frozenset([256]),
    },
    "bad words": {
        "bad_words_ids": tuple((i, j) for i in range(0, 256, 3) for j in range(0, 256, 7))
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_of_a_row_read_the_drafts_before_it(served, name, temperature):
    params = {"max_tokens": 20, "temperature": temperature, "seed": 8, **PROCESSORS[name]}
    served.run(PROMPTS, no_drafts, next(SALTS), **params)
    expected, logprobs = served.tokens(), served.logprobs()
    steps = []
    for wrong_every in (0, 2, 3):
        served.run(PROMPTS, drafts_from(expected, wrong_every), next(SALTS), **params)
        assert served.tokens() == expected
        assert served.logprobs() == pytest.approx(logprobs, abs=1e-5)
        steps.append(sum(len(served.outputs[name]) for name in "ab"))
    assert steps[0] < steps[1] < len(expected["a"]) + len(expected["b"])


def drafted(num_drafts: int, max_tokens: int = 20, **options):
    """A scheduler with one sequence at its first output token, 9, and drafts 9 behind it."""
    scheduler = make(**options)
    scheduler.add(request("a", 6, max_tokens=max_tokens))
    step(scheduler)
    (seq,) = scheduler.running
    seq.propose([9] * num_drafts)
    return scheduler, seq


def test_drafts_end_before_the_last_token_of_the_sequence():
    scheduler, _ = drafted(10, max_tokens=4)
    batch, outputs = step(scheduler)
    assert batch.num_new_tokens.tolist() == [3] and batch.forward_mode.is_extend()
    assert outputs[0].token_ids == [9, 9, 9] and outputs[0].finish_reason == "length"
    assert scheduler.cache.pool.usage == 0


def test_drafts_that_exceed_the_budget_are_cut():
    scheduler, seq = drafted(10, max_num_batched_tokens=8)
    batch, outputs = step(scheduler)
    assert batch.num_new_tokens.tolist() == batch.num_logits.tolist() == [8]
    assert outputs[0].token_ids == [9] * 8 and seq.num_remaining == 1


def test_tokens_before_invalid_logits_are_published_with_the_error():
    scheduler, _ = drafted(3)
    batch = scheduler.schedule()
    scheduler.launched(batch)
    (output,) = scheduler.commit(batch, StepOutput.of(batch, [9, INVALID_LOGITS, 9, 9])).outputs()
    assert output.token_ids == [9] and output.finish_reason == "error"
    assert "output token 3" in output.error


def test_a_sequence_with_drafts_in_flight_waits_for_their_commit():
    scheduler, seq = drafted(3)
    batch = scheduler.schedule()
    scheduler.launched(batch)
    assert scheduler.needs_tokens and not seq.takes_drafts
    scheduler.commit(batch, StepOutput.of(batch, [9, 8, 9, 9]))
    assert not scheduler.needs_tokens and seq.takes_drafts
    assert seq.token_ids[-3:] == [9, 9, 8] and seq.num_remaining == 1


def test_drafts_of_an_aborted_request_are_dropped():
    scheduler, _ = drafted(3)
    batch = scheduler.schedule()
    scheduler.launched(batch)
    scheduler.abort("a")
    assert scheduler.commit(batch, StepOutput.of(batch, [9] * 4)).outputs() == []
    assert scheduler.cache.pool.usage == 0


def test_drafts_that_find_no_block_are_dropped_and_nobody_is_preempted():
    scheduler, seq = drafted(0, num_blocks=7)
    scheduler.add(request("b", 18, max_tokens=2))
    step(scheduler)
    assert not scheduler.cache.pool.num_free and seq.takes_drafts
    seq.propose([9] * 10)
    batch, outputs = step(scheduler)
    assert {part.kind for part in batch.parts} == {DECODE} and not scheduler.num_preemptions
    assert outputs[0].token_ids == [9] and outputs[0].drafts is None


def test_kinds_are_data_whatever_the_number_of_tokens():
    """The last token of a prompt is a prompt, in a row of its own; a preempted sequence is a prompt again."""
    scheduler = make(num_blocks=6, max_num_batched_tokens=8)
    scheduler.add(request("a", 9, max_tokens=9))
    step(scheduler)
    batch, _ = step(scheduler)
    assert [part.kind for part in batch.parts] == [PROMPT] and batch.num_single_rows == 1
    assert batch.prefill_tokens == 1 and batch.forward_mode.is_decode()
    scheduler.add(request("b", 7, max_tokens=9))
    batch, _ = step(scheduler)
    assert [part.kind for part in batch.parts] == [DECODE, PROMPT]
    scheduler.running[0].propose([9, 9])
    batch, _ = step(scheduler)
    assert names(batch.seqs) == ["b", "a"] and batch.num_single_rows == 1
    assert [part.kind for part in batch.parts] == [DECODE, VERIFY] and not batch.prefill_tokens
    while not scheduler.num_preemptions:
        batch, _ = step(scheduler)
    while "b" not in names(batch.seqs):
        batch, _ = step(scheduler)
    (back,) = batch.parts
    assert back.kind is PROMPT and back.num_logits == 1


rows = st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=3), st.booleans())


@given(st.lists(rows, max_size=6), st.data())
def test_draws_count_up_to_the_first_that_differs(parts, data):
    seqs = [Sequence.from_request(make_request(str(n), [1])) for n in range(len(parts))]
    batch = ScheduledBatch.of(
        [
            ScheduledSequence(seq, VERIFY, 1 + len(drafts), 1 + len(drafts), tuple(drafts))
            if drafts
            else ScheduledSequence(seq, PROMPT, num_new, int(draws))
            for seq, (num_new, drafts, draws) in zip(seqs, parts, strict=True)
        ]
    )
    drawn, expected, counts = [], [], []
    for part in batch.parts:
        tokens = data.draw(
            st.lists(st.integers(-1, 2), min_size=part.num_logits, max_size=part.num_logits)
        )
        kept = 0
        while kept < len(part.draft_token_ids) and tokens[kept] == part.draft_token_ids[kept]:
            kept += 1
        counts.append(min(kept + 1, part.num_logits))
        expected += tokens[: counts[-1]]
        drawn += tokens
    logprobs = [TokenLogprobs(float(token), 1, [], []) for token in drawn]
    found = StepOutput.of(batch, drawn, logprobs)
    assert found.token_ids == expected and found.counts == counts
    assert [int(entry.logprob) for entry in found.logprobs] == expected


@pytest.mark.parametrize(("num_blocks", "capacity"), [(6, 12), (4, 8)])
def test_a_sequence_has_memory_for_the_passes_of_a_draft_model_while_it_is_free(
    num_blocks: int, capacity: int
) -> None:
    """Otherwise its drafts would end with its last block."""
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=4)
    config = SpeculationConfig(method="mtp", num_draft_tokens=3, adaptive=False)
    scheduler.speculator = make_speculator(config)
    assert scheduler.add(make_request("a", [1] * 5, max_tokens=9)) is None
    counts = []
    for _ in range(2):
        batch = scheduler.schedule()
        scheduler.launched(batch)
        counts.append(batch.seqs[0].capacity)
        scheduler.commit(batch, StepOutput.of(batch, [9]))
    assert counts[1] == capacity
