"""A whole rank in this process: its mask is computed beside the forward, and only for who has a grammar."""

import pytest
from llguidance import LLMatcher

from tests.distributed.engine_harness import make_request, rank_config
from workers.rank.rank import Rank
from workers.rank.rank_info import Rendezvous
from workers.sampling.grammar_bitmask import PendingBitmask
from workers.weights.checkpoint import make_checkpoint


@pytest.fixture
def rank(tmp_path):
    checkpoint = make_checkpoint(
        tmp_path / "tiny", num_layers=1, hidden_size=16, num_experts=2, num_experts_per_tok=1
    )
    rank = Rank(0, rank_config(checkpoint, 1))
    rank.join_group(Rendezvous("127.0.0.1", 0, "alone"), 10)
    rank.load()
    rank.outputs = {}

    def publish(_ingress_id, outputs):
        for output in outputs:
            rank.outputs.setdefault(output.request_id, []).extend(output.token_ids)

    rank.start_engine(publish, lambda step: None)
    yield rank
    rank.close()


def step(rank, times):
    for _ in range(times):
        rank.engine.step()
        rank.grammars.wait()


def test_the_mask_is_begun_before_the_forward_and_awaited_after_it(rank, monkeypatch):
    order = []
    runner = rank.engine.runner

    def note(owner, name, word):
        call = getattr(owner, name)

        def noting(*args, **kwargs):
            order.append(word)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note(runner._masks, "start", "start")
    note(runner.model, "forward", "forward")
    note(runner.model, "compute_logits", "logits")
    note(PendingBitmask, "wait", "wait")
    rank.engine.submit(make_request("plain", [1, 2, 3], max_tokens=2))
    step(rank, 2)
    assert order == ["forward", "logits"] * 2  # nothing for those who have no grammar
    order.clear()
    grammar = LLMatcher.grammar_from_regex("[xyz]{4}")
    rank.engine.submit(make_request("held", [1, 2, 3], max_tokens=9, grammar=grammar))
    rank.engine.submit(make_request("free", [1, 2, 3], max_tokens=9))
    step(rank, 2)
    assert order[-4:] == ["start", "forward", "logits", "wait"]
    step(rank, 12)
    held = bytes(rank.outputs["held"]).decode()
    assert len(held) == 4 and set(held) <= set("xyz")
    assert rank.outputs["free"][:2] == rank.outputs["plain"] and len(rank.outputs["free"]) == 9


def test_a_prompt_in_chunks_waits_for_its_mask(rank):
    grammar = LLMatcher.grammar_from_regex("ab")
    prompt = [i % 250 for i in range(600)]  # over three steps
    rank.engine.submit(make_request("long", prompt, max_tokens=5, grammar=grammar))
    step(rank, 8)
    assert bytes(rank.outputs["long"]) == b"ab"
