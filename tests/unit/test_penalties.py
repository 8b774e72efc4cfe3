"""Logits processors: equal to a plain reference in any batch, in any slot and after preemption."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from tests.unit.schedulers import append_token
from workers.sampling.logits_processors import LogitsProcessors
from workers.sampling.no_token import ALL_FORBIDDEN, INVALID_LOGITS
from workers.sampling.sampler import Sampler
from workers.sampling.token_bitmask import TokenBitmask
from workers.step.sequence import InputBatch, Sequence
from workers.wire.request import EngineRequest, SamplingParams

torch.set_num_threads(1)
CPU = torch.device("cpu")
V = 41  # no multiple of 32: the mask's last word is not full


def make(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **fields})


def reference(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], allowed=None
) -> list[float]:
    """The same, token by token."""
    result = list(logits)
    forbidden = {
        word[-1]
        for word in params.bad_words_ids
        if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]
    }
    for token in range(V):
        value = np.float32(result[token])
        if allowed is not None and token not in allowed:
            value = np.float32(-np.inf)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = np.float32(-np.inf)
        if token in forbidden:
            value = np.float32(-np.inf)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            value = np.float32(-np.inf)
        value += np.float32(dict(params.logit_bias).get(token, 0))
        if token in prompt or token in output:
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value -= np.float32(params.frequency_penalty) * output.count(token)
        value -= np.float32(params.presence_penalty) * (token in output)
        result[token] = float(value)
    return result


def pack(allowed: list[set[int]]) -> torch.Tensor:
    words = np.zeros((len(allowed), -(-V // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


sparse = st.integers(0, V + 20)  # some beyond the vocabulary
few = st.integers(0, 2)  # of which outputs repeat words
words = st.one_of(
    st.tuples(few),
    st.tuples(sparse),
    st.lists(few, min_size=2, max_size=4).map(tuple),
    st.tuples(few, sparse),
)
processed = st.builds(
    make,
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(sparse, st.floats(-100, 100, width=32), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.frozensets(sparse, max_size=3),
    bad_words_ids=st.lists(words, max_size=3).map(tuple),
    allowed_token_ids=st.one_of(
        st.none(),
        st.sets(st.integers(0, V - 1), max_size=3).map(
            lambda left_out: tuple(sorted({*range(V + 3)} - left_out))
        ),
    ),
)
tokens = st.one_of(st.lists(st.integers(0, V - 1), max_size=6), st.lists(few, max_size=6))


@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(make()), processed),
            tokens.filter(bool),
            tokens,
            st.one_of(st.none(), st.sets(st.integers(0, V - 1), min_size=12)),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
)
def test_processors_equal_the_reference(rows, seed):
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed)) * 4
    expected = torch.tensor(
        [
            reference(logits[i].tolist(), params, prompt, output, allowed)
            for i, (params, prompt, output, allowed) in enumerate(rows)
        ]
    )
    table = LogitsProcessors(8, V, CPU)
    slots = random.Random(seed).sample(range(8), len(rows))
    token_ids = np.full((8, 20), 3)  # what is behind a row's own tokens must not matter
    for slot, (params, prompt, output, _) in zip(slots, rows, strict=True):
        table.set(slot, params, prompt, output)
        token_ids[slot, : len(prompt + output)] = prompt + output
    masked = [row for row, (*_, allowed) in enumerate(rows) if allowed is not None]
    if masked:
        TokenBitmask(torch.tensor(masked), pack([rows[row][3] for row in masked])).apply(logits)
    found = table.batch(np.array(slots))
    if found is not None:
        positions = np.array([len(prompt) + len(output) for _, prompt, output, _ in rows])
        table.apply(logits, found, positions, token_ids)
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)


class Rows:
    """A sampler and the table of its sequences."""

    def __init__(self, num_rows: int):
        self.table = InputBatch(num_rows, max_model_len=64)
        self.sampler = Sampler(self.table, num_rows, V, CPU)

    def admit(self, *requests: "Request") -> "Rows":
        for request in requests:
            self.table.add(request.seq)
            self.sampler.admit(request.seq)
        return self

    def sample(self, requests: list["Request"], logits: torch.Tensor, mask=None) -> list[int]:
        rows = np.array([request.seq.row for request in requests])
        positions = np.array([request.seq.num_tokens for request in requests])
        sampled = self.sampler.sample(logits.clone(), rows, positions, mask)
        found, logprobs = sampled.token_B.tolist(), sampled.entries()
        assert logprobs is None
        return found


@dataclass
class Request:
    """One in the random traffic below, and what a plain reference says of its next token."""

    seq: Sequence
    logits: torch.Generator = field(repr=False)

    @classmethod
    def make(cls, number: int, params: SamplingParams, prompt: list[int]) -> "Request":
        request = EngineRequest(
            request_id=str(number), ingress_id="i", prompt_token_ids=prompt, params=params
        )
        return cls(Sequence.from_request(request), torch.Generator().manual_seed(number))

    def next(self) -> tuple[torch.Tensor, int]:
        """Its logits at this position, and the token they must give."""
        # Few distinct values and a strong favourite: penalties and stops change most tokens.
        logits_V = torch.randn(V, generator=self.logits) + 3 * (torch.arange(V) % 9 == 2)
        request = self.seq.request
        output = self.seq.token_ids[len(request.prompt_token_ids) :]
        edited = reference(logits_V.tolist(), request.params, request.prompt_token_ids, output)
        return logits_V, int(np.argmax(edited))


arrivals = st.lists(
    st.tuples(st.one_of(st.just(make()), processed), tokens.filter(bool)), min_size=1, max_size=8
)


@settings(max_examples=30)
@given(arrivals, st.randoms(use_true_random=False))
def test_tokens_with_preemption_and_reused_slots(arrivals, chance):
    """Requests come, are preempted, come back to other slots and end; each gets its own tokens throughout."""
    rows = Rows(3)
    waiting = [Request.make(i, *arrival) for i, arrival in enumerate(arrivals)]
    running: list[Request] = []
    for _ in range(40):
        while waiting and len(running) < 3:
            chance.shuffle(rows.table._free_rows)
            running.append(waiting.pop(0))
            rows.admit(running[-1])
        chance.shuffle(running)
        # Who is not in the batch is in the middle of a chunked prefill.
        batch = running[: chance.randint(1, len(running))] if running else []
        if not batch:
            break
        logits, expected = zip(*(request.next() for request in batch), strict=True)
        assert rows.sample(batch, torch.stack(logits)) == list(expected)
        for request, token in zip(batch, expected, strict=True):
            append_token(rows.table, request.seq, token)
            fate = chance.random()
            if fate < 0.3:  # preempted, or finished
                running.remove(request)
                rows.table.remove(request.seq)
                if fate < 0.2:
                    waiting.append(request)


@given(st.lists(st.tuples(processed, tokens.filter(bool), tokens), min_size=1, max_size=5))
@settings(max_examples=40)
def test_a_row_does_not_depend_on_the_others(rows):
    logits = torch.randn(len(rows) + 1, V, generator=torch.Generator().manual_seed(1))
    requests = [Request.make(0, make(temperature=1.0, seed=7), [1])]
    requests += [Request.make(i, params, prompt) for i, (params, prompt, _) in enumerate(rows)]
    for request, (*_, output) in zip(requests[1:], rows, strict=True):
        request.seq.token_ids += output

    def pick(indices: list[int]) -> list[int]:
        batch = [requests[index] for index in indices]
        return Rows(len(batch)).admit(*batch).sample(batch, logits[indices])

    order = list(range(len(requests)))
    assert pick(order) == [pick([index])[0] for index in order] == pick(order[::-1])[::-1]


@pytest.mark.parametrize("penalty", [1.7, 0.9])
def test_repetition_and_min_tokens_equal_transformers(penalty):
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(V, (1, 9), generator=generator)
    processors = LogitsProcessorList(
        [
            MinNewTokensLengthLogitsProcessor(9, 4, [2, 11, 20]),
            RepetitionPenaltyLogitsProcessor(penalty),
        ]
    )
    params = make(
        repetition_penalty=penalty, min_tokens=4, stop_token_ids=frozenset({2, 11, 20, V + 5})
    )
    request = Request.make(0, params, prompt[0].tolist())
    rows = Rows(1).admit(request)
    ids = prompt
    for _ in range(12):
        logits = torch.randn(1, V, generator=generator) + 4 * (torch.arange(V) % 9 == 2)
        expected = processors(ids, logits.clone()).argmax(-1)
        assert rows.sample([request], logits) == expected.tolist()
        append_token(rows.table, request.seq, int(expected))
        ids = torch.cat((ids, expected[None]), dim=1)
    assert len(set(ids[0, 9:].tolist()) & {2, 11, 20}) > 0, "no stop token came: a useless test"


def test_min_tokens_gives_way_when_only_the_end_is_left():
    """A grammar at its end allows the end alone; a vocabulary of stop tokens allows nothing else either."""
    requests = [
        Request.make(row, make(min_tokens=9, stop_token_ids=frozenset(stops)), [1])
        for row, stops in enumerate([{5}, set(range(V))])
    ]
    logits = torch.linspace(0, 1, V).repeat(2, 1)
    mask = TokenBitmask(torch.tensor([0]), pack([{5}]))
    assert Rows(2).admit(*requests).sample(requests, logits, mask) == [5, V - 1]


def test_a_mask_without_a_token_ends_its_row_only():
    requests = [Request.make(row, make(), [1]) for row in range(2)]
    logits = torch.linspace(0, 1, V).repeat(2, 1)
    mask = TokenBitmask(torch.tensor([1]), pack([set()]))
    assert Rows(2).admit(*requests).sample(requests, logits, mask) == [V - 1, ALL_FORBIDDEN]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_end_their_row_only(bad):
    params = make(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias=((3, 9.0),))
    requests = [Request.make(row, params, [1, 2]) for row in range(3)]
    rows = Rows(3).admit(*requests)
    logits = torch.linspace(0, 1, V).repeat(3, 1)
    logits[1, 7] = bad
    mask = TokenBitmask(torch.arange(3), pack([set(range(7))] * 3))  # does not hide it
    for _ in range(2):  # the second time after an invalid token was counted
        assert rows.sample(requests, logits, mask) == [3, INVALID_LOGITS, 3]


def test_batches_without_processors_do_not_touch_the_state():
    table = LogitsProcessors(4, V, CPU)
    assert table.batch(np.arange(4)) is None
    table.set(2, make(presence_penalty=1.0), [1], [])
    assert table.batch(np.array([0, 1, 3])) is None and table.batch(np.array([0, 2])) is not None
    table.set(2, make(), [1], [])
    assert table.batch(np.array([0, 2])) is None


def test_bad_words_match_output_only_and_the_row_may_have_no_token_left():
    """The prompt ends with the beginning of a word; its output does so later."""
    params = make(bad_words_ids=((3, 4), (5,)), allowed_token_ids=(3, 4, 5))
    request = Request.make(0, params, [1, 3])
    rows = Rows(1).admit(request)
    assert request.seq.needs_last_token
    best_is_4 = torch.full((1, V), -1.0).index_fill_(1, torch.tensor([4]), 1.0)
    assert rows.sample([request], best_is_4) == [4]
    append_token(rows.table, request.seq, 3)
    assert rows.sample([request], best_is_4) == [3]
    nothing = Request.make(1, make(bad_words_ids=((7,),), allowed_token_ids=(7,)), [1])
    other = Request.make(2, make(), [1])
    assert not nothing.seq.needs_last_token
    assert Rows(2).admit(nothing, other).sample([nothing, other], best_is_4.repeat(2, 1)) == [
        ALL_FORBIDDEN,
        4,
    ]


def test_allowed_tokens_beyond_the_vocabulary_allow_nothing():
    request = Request.make(0, make(allowed_token_ids=(V, V + 30, 2**31 - 1)), [1])
    assert Rows(1).admit(request).sample([request], torch.zeros(1, V)) == [ALL_FORBIDDEN]


def test_the_question_whether_draws_read_tokens_gathers_nothing(monkeypatch) -> None:
    """The runner asks before the draft model's collectives, which must follow even if memory for a gather lacks."""
    plain, penalised = (
        Request.make(number, make(presence_penalty=penalty), [3])
        for number, penalty in enumerate((0.0, 0.5))
    )
    rows = Rows(2).admit(plain, penalised)

    def gather(_: LogitsProcessors, slots: list[int]) -> None:
        raise torch.OutOfMemoryError(str(slots))

    monkeypatch.setattr(LogitsProcessors, "_gather", gather)
    places = np.array([plain.seq.row, penalised.seq.row])
    assert rows.sampler.reads_tokens(places) and not rows.sampler.reads_tokens(places[:1])
