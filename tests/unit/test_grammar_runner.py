"""A whole rank in this process: its mask is computed beside the forward, and only for requests with a grammar."""

import pytest
from llguidance import LLMatcher

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import make_request, rank_config
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.sampling.grammar_bitmask import PendingBitmask
from workers.step.step_sync import LockstepError


@pytest.fixture
def epoch(tmp_path):
    checkpoint = make_checkpoint(
        tmp_path / "tiny", num_layers=1, hidden_size=16, num_experts=2, num_experts_per_tok=1
    )
    epoch = Epoch(
        RankProcess(0, rank_config(checkpoint, 1)), Rendezvous("127.0.0.1", 0, "alone"), 60
    )
    epoch.load()
    epoch.outputs = {}

    def publish(_ingress_id, outputs):
        for output in outputs:
            epoch.outputs.setdefault(output.request_id, []).extend(output.token_ids)

    epoch.start_engine(publish, lambda step: None)
    yield epoch
    epoch.process.close()


def step(epoch, times):
    for _ in range(times):
        epoch.engine.step()
        epoch.process.grammars.wait()


def test_the_mask_is_begun_before_the_forward_and_awaited_after_it(epoch, monkeypatch):
    order = []
    runner = epoch.engine.runner

    def note(owner, name, word):
        call = getattr(owner, name)

        def noting(*args, **kwargs):
            order.append(word)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note(runner._masks._masks, "start", "start")
    note(runner.model, "forward", "forward")
    note(runner.model, "compute_logits", "logits")
    note(PendingBitmask, "wait", "wait")
    epoch.engine.submit(make_request("plain", [1, 2, 3], max_tokens=2))
    step(epoch, 2)
    assert order == ["forward", "logits"] * 2  # nothing for those who have no grammar
    order.clear()
    grammar = LLMatcher.grammar_from_regex("[xyz]{4}")
    epoch.engine.submit(make_request("held", [1, 2, 3], max_tokens=9, grammar=grammar))
    epoch.engine.submit(make_request("free", [1, 2, 3], max_tokens=9))
    step(epoch, 2)
    assert order[-4:] == ["start", "forward", "logits", "wait"]
    step(epoch, 12)
    held = bytes(epoch.outputs["held"]).decode()
    assert len(held) == 4 and set(held) <= set("xyz")
    assert epoch.outputs["free"][:2] == epoch.outputs["plain"] and len(epoch.outputs["free"]) == 9


def test_a_prompt_in_chunks_waits_for_its_mask(epoch):
    grammar = LLMatcher.grammar_from_regex("ab")
    prompt = [i % 250 for i in range(600)]  # over three steps
    epoch.engine.submit(make_request("long", prompt, max_tokens=5, grammar=grammar))
    step(epoch, 8)
    assert bytes(epoch.outputs["long"]) == b"ab"


def test_masks_belong_to_the_sequences_that_sample(epoch):
    """A chunk of one token precedes a prompt that samples: the first row of the logits is not the chunk's."""
    runner, grammars = epoch.engine.runner, []
    masks = runner._masks._masks
    start = masks.start
    masks.start = lambda found: start(grammars.append(list(found)) or grammars[-1])
    grammar = LLMatcher.grammar_from_regex
    epoch.engine.submit(make_request("short", [1] * 255, max_tokens=4, grammar=grammar("ab")))
    epoch.engine.submit(make_request("long", [2] * 300, max_tokens=4, grammar=grammar("xyz")))
    epoch.process.grammars.wait()
    scheduled = []
    launch = runner.launch
    runner.launch = lambda batch, plan: scheduled.append(batch) or launch(batch, plan)
    step(epoch, 8)
    mixed = next(batch for batch in scheduled if len(batch.seqs) == 2)
    assert mixed.num_new_tokens.tolist() == [1, 255] and mixed.num_logits.tolist() == [0, 1]
    assert grammars[scheduled.index(mixed)] == [(mixed.seqs[1].grammar, ())]
    assert bytes(epoch.outputs["short"]) == b"ab" and bytes(epoch.outputs["long"]) == b"xyz"


def test_an_error_after_the_forward_is_voted(epoch, monkeypatch):
    """Peers are not in a collective then: the step ends, and the next vote carries the error."""

    def fail(*args):
        raise MemoryError("no room for the logits")

    monkeypatch.setattr(epoch.engine.runner._sampler, "sample", fail)
    epoch.engine.submit(make_request("a", [1, 2, 3]))
    assert epoch.engine.step().run
    with pytest.raises(LockstepError, match="rank 0: MemoryError: no room for the logits"):
        epoch.engine.step()


def test_an_error_in_the_forward_is_raised_and_resets_the_all2all(epoch, monkeypatch):
    """A dispatch whose combine never runs would otherwise be left for the next step of the process."""
    resets = []

    def fail(batch):
        raise MemoryError("no room for the experts")

    monkeypatch.setattr(epoch.engine.runner.model, "forward", fail)
    monkeypatch.setattr(epoch.backends.all2all, "reset", lambda: resets.append(1))
    epoch.engine.submit(make_request("a", [1, 2, 3]))
    with pytest.raises(MemoryError, match="no room for the experts"):
        epoch.engine.step()
    assert resets == [1]
