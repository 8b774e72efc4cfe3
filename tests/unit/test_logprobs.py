"""Log-probabilities of outputs and prompts: equal to log_softmax, of raw logits, only for who asks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.sampling import logprobs as logprobs_module
from workers.sampling.logprobs import PromptLogprobs, token_logprobs
from workers.sampling.sampler import Sampler
from workers.sampling.token_bitmask import TokenBitmask
from workers.step.sequence import InputBatch, ScheduledSequence, Sequence
from workers.step.step_output import StepOutput
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams, TokenLogprobs

torch.set_num_threads(1)
CPU = torch.device("cpu")
V, D = 50, 6


def sequence(row: int, prompt: list[int], **params) -> Sequence:
    request = EngineRequest(
        request_id=str(row),
        ingress_id="i",
        prompt_token_ids=prompt,
        params=SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params}),
    )
    seq = Sequence.from_request(request)
    seq.row, seq.num_prefill_tokens = row, len(prompt)
    return seq


def sampler_of(seqs: list[Sequence]) -> Sampler:
    table = InputBatch(len(seqs), max_model_len=16)
    sampler = Sampler(table, len(seqs), V, CPU)
    for seq in seqs:
        table.add(seq)
        sampler.admit(seq)
    return sampler


def check(found: TokenLogprobs, logits_V: torch.Tensor, token: int, num_top: int) -> None:
    expected_V = logits_V.double().log_softmax(-1)
    assert found.logprob == pytest.approx(expected_V[token].item(), abs=2e-5)
    assert found.rank == 1 + int((logits_V > logits_V[token]).sum())
    order = logits_V.argsort(descending=True)[:num_top]
    # Equal logits may come in any order; one of 50,000 rows of 50 random ones has two.
    assert torch.equal(logits_V[found.top_ids], logits_V[order])
    assert len(found.top_ids) == len(set(found.top_ids))
    assert found.top_logprobs == pytest.approx(expected_V[order].tolist(), abs=2e-5)


@given(st.lists(st.integers(0, V + 9), max_size=6), st.integers(0, 2**32 - 1))
def test_token_logprobs_equal_log_softmax(num_top, seed):
    generator = torch.Generator().manual_seed(seed)
    logits_NV = torch.randn(len(num_top), V, generator=generator) * 9
    token_N = torch.randint(V, (len(num_top),), generator=generator)
    found = token_logprobs(logits_NV, token_N, num_top).lists()
    for index, (row, token) in enumerate(zip(logits_NV, token_N.tolist(), strict=True)):
        check(found[index], row, token, min(num_top[index], V))


def test_rank_counts_only_the_strictly_better():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ranks = [token_logprobs(logits, torch.tensor([t]), [0]).rank_N.item() for t in range(4)]
    assert ranks == [4, 1, 1, 3]


def test_raw_logits_for_the_rows_that_ask():
    """Neither mask nor bias, penalties, temperature and filters show; other rows get nothing."""
    seqs = [
        sequence(0, [1]),
        sequence(1, [1], logprobs=3, logit_bias=((7, 100.0),)),
        sequence(2, [1], logprobs=0, temperature=5.0, top_k=2, seed=1),
        sequence(3, [1, 4], logprobs=5, repetition_penalty=9.0, presence_penalty=2.0),
        sequence(4, [1], logprobs=2),
    ]
    sampler = sampler_of(seqs)
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    allowed = torch.zeros(1, 2, dtype=torch.int32)
    allowed[0, 0] = 1 << 9
    mask = TokenBitmask(torch.tensor([4]), allowed)
    positions = np.array([seq.num_tokens for seq in seqs])
    sampled = sampler.sample(logits.clone(), np.arange(5), positions, mask)
    tokens, found = sampled.token_B.tolist(), sampled.entries()
    assert tokens[1] == 7 and tokens[4] == 9
    assert found is not None and found[0] is None
    for row, num_top in ((1, 3), (2, 0), (3, 5), (4, 2)):
        check(found[row], logits[row], tokens[row], num_top)
    # The slot of row 2 goes to somebody who does not ask.
    sampler.admit(sequence(2, [1]))
    assert sampler.sample(logits[[2]], np.array([2]), positions[[2]]).logprobs is None


def test_an_invalid_row_does_not_disturb_the_others():
    sampler = sampler_of([sequence(row, [1], logprobs=1) for row in range(2)])
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = torch.nan
    sampled = sampler.sample(logits.clone(), np.arange(2), np.array([1, 1]))
    tokens, found = sampled.token_B.tolist(), sampled.entries()
    assert tokens[0] == -1
    check(found[1], logits[1], tokens[1], 1)
    outputs = [RequestOutput("0", [], "error", "NaN"), RequestOutput("1", [tokens[1]])]
    attached = StepOutput(token_ids=tokens, counts=[1, 1], logprobs=found).attach(outputs)
    assert attached[0] == outputs[0] and attached[1].logprobs == [found[1]]


def attach(logprobs, outputs, prompt_logprobs=None) -> list[RequestOutput]:
    """Attach to the outputs of two sequences with a token each."""
    step = StepOutput(
        token_ids=[1, 2], counts=[1, 1], logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    return step.attach(outputs)


def test_attach_gives_each_output_its_own():
    one, two = TokenLogprobs(-1.0, 1, [], []), TokenLogprobs(-2.0, 2, [3], [-0.5])
    outputs = [RequestOutput("a", [1]), RequestOutput("b", [2], "stop", num_cached_tokens=4)]
    assert attach(None, [None, *outputs[1:]]) == outputs[1:]
    assert attach([one, None], [None, *outputs[1:]]) == outputs[1:]
    assert attach([None, one], outputs) == [
        RequestOutput("a", [1]),
        RequestOutput("b", [2], "stop", logprobs=[one], num_cached_tokens=4),
    ]
    assert attach(None, outputs, {"a": [None, two]}) == [
        RequestOutput("a", [1], prompt_logprobs=[None, two]),
        outputs[1],
    ]


def test_attach_gives_each_token_its_own():
    """Three sequences: no token, three tokens of which a stop leaves two, one token without log-probabilities."""
    entries = [TokenLogprobs(-float(n), n, [], []) for n in range(1, 4)]
    step = StepOutput(token_ids=[1, 2, 3, 4], counts=[0, 3, 1], logprobs=[*entries, None])
    outputs = [None, RequestOutput("a", [1, 2], "stop"), RequestOutput("b", [4])]
    assert step.attach(outputs) == [
        RequestOutput("a", [1, 2], "stop", logprobs=entries[:2]),
        RequestOutput("b", [4]),
    ]


class FakeModel:
    """Hidden states drawn once for each (sequence, position), and a head."""

    def __init__(self, monkeypatch):
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(4, 40, D, generator=generator)
        self.head = torch.randn(V, D, generator=generator) * 3
        self.most_rows = 0
        monkeypatch.setattr(logprobs_module, "MAX_LOGITS_ROWS", 4)

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden_ND))
        return hidden_ND @ self.head.T


def forward(model: FakeModel, collector: PromptLogprobs, work: list[tuple[Sequence, int]]):
    """One step over (sequence, number of new tokens), as the runner and the scheduler do it."""
    hidden = [
        model.hidden[
            int(seq.request.request_id), seq.num_computed_tokens : seq.num_computed_tokens + count
        ]
        for seq, count in work
    ]
    starts = np.cumsum([0, *(count for _, count in work)]).astype(np.int32)
    padding = torch.full((3, D), torch.nan)
    parts = [
        ScheduledSequence(seq, seq.kind, count, int(count == seq.num_remaining))
        for seq, count in work
    ]
    states = torch.cat([*hidden, padding])
    lens = np.array([seq.num_computed_tokens + count for seq, count in work], dtype=np.int32)
    for seq, count in work:
        seq.num_computed_tokens += count
    place = starts, lens, states
    found = collector.collect(parts, *place, lambda rows, _: model.compute_logits(rows))
    return found and {name: parts.lists() for name, parts in found.items()}


def check_prompt(model: FakeModel, seq: Sequence, found, num_top: int) -> None:
    prompt = seq.request.prompt_token_ids
    assert len(found) == len(prompt) and found[0] is None
    hidden = model.hidden[int(seq.request.request_id)]
    for position in range(1, len(prompt)):
        logits_V = hidden[position - 1] @ model.head.T
        check(found[position], logits_V, prompt[position], num_top)


# The last ones end a chunk just before the prompt's last token, which has no successor to predict.
@pytest.mark.parametrize("chunks", [[17], [9, 8], [1] * 17, [4, 4, 4, 4, 1], [16, 1], [15, 2]])
def test_prompt_in_chunks_beside_others(monkeypatch, chunks):
    model, collector = FakeModel(monkeypatch), PromptLogprobs()
    prompt = torch.randint(V, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    other, seq = sequence(1, [5] * 30), sequence(2, prompt, prompt_logprobs=2)
    short = sequence(0, [9], prompt_logprobs=0)
    for each in (other, seq, short):
        collector.admit(each)
    assert forward(model, collector, [(short, 1), (other, 3)]) == {"0": [None]}
    for chunk in chunks[:-1]:
        assert forward(model, collector, [(other, 1), (seq, chunk)]) is None
    found = forward(model, collector, [(other, 1), (seq, chunks[-1])])
    assert found is not None and list(found) == ["2"]
    check_prompt(model, seq, found["2"], 2)
    assert model.most_rows <= 4
    assert forward(model, collector, [(other, 1), (seq, 1)]) is None


def test_preemption_in_the_middle_of_a_prompt_starts_again(monkeypatch):
    model, collector = FakeModel(monkeypatch), PromptLogprobs()
    seq = sequence(2, list(range(20, 31)), prompt_logprobs=1)
    collector.admit(seq)
    assert forward(model, collector, [(seq, 6)]) is None
    seq.num_computed_tokens, seq.row = 0, 3
    # Its old row goes to somebody who does not ask, it comes back in another.
    newcomer = sequence(2, [1] * 8)
    collector.admit(newcomer)
    collector.admit(seq)
    assert forward(model, collector, [(newcomer, 8), (seq, 4)]) is None
    check_prompt(model, seq, forward(model, collector, [(seq, 7)])["2"], 1)
    # Preempted again with output: the prompt was told already.
    seq.token_ids.append(7)
    seq.num_computed_tokens = 0
    collector.admit(seq)
    assert forward(model, collector, [(seq, 12)]) is None
