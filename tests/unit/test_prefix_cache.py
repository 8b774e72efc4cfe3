"""Prefix caching in the scheduler: what is found, what is not, and that nobody's tokens change by it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.paged_model import VOCAB, PagedModel
from tests.unit.schedulers import blocks_of, make_scheduler
from workers.config import SchedulerConfig
from workers.kv_cache.block_groups import FullGroup, WindowGroup
from workers.kv_cache.block_pool import chain_keys, root_key
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.scheduler.scheduler import MAX_HELD_BACK
from workers.step.sequence import DECODE
from workers.step.step_output import StepOutput
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 0]


class Server:
    """A scheduler, its model, and what came out. prefill_cap: most prompt tokens of a step, 0 = no limit."""

    def __init__(
        self,
        num_blocks: int = 32,
        caching: bool = True,
        window: int | None = None,
        snapshots: int | None = None,
        prefill_cap: int = 0,
        **limits,
    ):
        values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **limits}
        states = None
        if snapshots is not None:
            states = StateSnapshots(1 + values["max_num_seqs"], snapshots, min_gain=BLOCK)
        self.scheduler = make_scheduler(
            SchedulerConfig(**values),
            num_blocks=num_blocks,
            block_size=BLOCK,
            prefix_caching=caching,
            window=window,
            snapshots=states,
        )
        self.decodes_fit = values["max_num_seqs"] <= values["max_num_batched_tokens"]
        self.prefill_cap = prefill_cap
        self.model = PagedModel(self.scheduler)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 1,
        salt: str = "",
        priority: int = 0,
        emitted: list[int] | None = None,
        **params,
    ):
        error = self.scheduler.add(
            EngineRequest(
                request_id=name,
                ingress_id="i",
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, **params),
                cache_salt=salt,
                priority=priority,
                emitted_token_ids=emitted or [],
            )
        )
        assert error is None

    def step(self) -> None:
        decoding = {seq for seq in self.scheduler.running if seq.kind is DECODE}
        batch = self.scheduler.schedule(self.prefill_cap)
        assert not self.prefill_cap or batch.prefill_tokens <= self.prefill_cap
        if self.decodes_fit:
            assert {seq for seq in decoding if seq.row >= 0} <= set(batch.seqs)
        tokens = self.model.execute(batch)
        self.scheduler.launched(batch)
        for output in self.scheduler.commit(batch, StepOutput.of(batch, tokens)).outputs():
            self.outputs.setdefault(output.request_id, []).append(output)

    def finish(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("somebody waits for ever")

    def run(self, name: str, prompt: list[int], *args, **kwargs) -> int:
        """Run one request to its end; the tokens it found in the cache."""
        self.add(name, prompt, *args, **kwargs)
        self.finish()
        return self.outputs[name][0].num_cached_tokens

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]


def test_a_second_request_computes_only_what_differs():
    server = Server()
    assert server.run("a", PROMPT) == 0
    before = server.model.num_tokens
    assert server.run("b", [*PROMPT[:9], 0, 0, 0, 0]) == 8
    assert server.model.num_tokens - before == 5
    assert server.scheduler.cache.num_queries == 26 and server.scheduler.cache.num_hits == 8
    assert server.scheduler.cache.pool.usage == 0


def test_the_last_token_of_a_prompt_is_always_computed():
    server = Server()
    server.run("a", PROMPT[:8])
    assert server.run("again", PROMPT[:8]) == 4
    assert server.run("longer", PROMPT[:9]) == 8
    assert server.tokens("again") == server.tokens("a")


def test_the_next_turn_of_a_chat_finds_the_answer_too():
    server = Server()
    server.run("a", PROMPT, max_tokens=12)
    history = PROMPT + server.tokens("a")  # 25 tokens; the last one's K and V were never computed
    assert server.run("b", [*history, 1, 2, 3]) == 24


def test_only_the_first_output_tells_what_was_cached():
    server = Server()
    server.run("a", PROMPT)
    server.run("b", PROMPT, max_tokens=3)
    assert [output.num_cached_tokens for output in server.outputs["b"]] == [12, 0, 0]


def test_running_and_finished_requests_share():
    server = Server()
    server.add("a", PROMPT, max_tokens=20)
    server.step()
    server.add("b", PROMPT, max_tokens=20)
    server.step()
    a, b = server.scheduler.running
    of_a, of_b = (blocks_of(server.scheduler, seq) for seq in (a, b))
    assert of_a[:3] == of_b[:3] and not set(of_a[3:]) & set(of_b[3:])
    assert server.scheduler.cache.pool.num_free == 32 - len({*of_a, *of_b})
    assert server.outputs["b"][0].num_cached_tokens == 12
    server.finish()
    assert server.tokens("a") == server.tokens("b") and server.scheduler.cache.pool.usage == 0


def test_equal_prompts_that_come_together_are_computed_once_and_hold_nobody_up():
    server = Server()
    for name, prompt in [("a", PROMPT), ("b", PROMPT), ("c", PROMPT), ("other", [6, 6, 6])]:
        server.add(name, prompt)
    server.step()
    assert list(server.outputs) == ["a", "other"]
    server.step()
    assert [server.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 12, 12]
    assert server.tokens("a") == server.tokens("b") == server.tokens("c")


def test_a_prompt_waits_only_for_blocks_that_are_its_own_too():
    server = Server(max_num_batched_tokens=8)
    server.add("a", PROMPT * 3)
    server.step()
    server.add("same", PROMPT * 3)
    server.add("parts", [*PROMPT[:8], 0, 0, 0, 0, 0])
    for _ in range(4):
        server.step()
    assert [seq.request.request_id for seq in server.scheduler.waiting] == ["same"]
    server.finish()
    assert server.outputs["parts"][0].num_cached_tokens == 8
    assert server.outputs["same"][0].num_cached_tokens == 36
    assert server.tokens("a") == server.tokens("same")


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_who_waits_for_blocks_goes_on_when_they_do_not_come(end):
    server = Server(num_blocks=16, max_num_batched_tokens=8)
    server.add("a", PROMPT * 3, max_tokens=2)
    server.add("b", PROMPT * 3, max_tokens=2)
    server.step()
    if end == "abort":
        server.scheduler.abort("a")
    else:
        server.scheduler._preempt_last()
    for _ in range(30):
        server.step()
    assert not server.scheduler.has_work
    assert server.outputs["b"][0].num_cached_tokens == (8 if end == "abort" else 36)


def test_more_equal_prompts_than_are_looked_at_still_end():
    server = Server(num_blocks=24)
    for index in range(3 * MAX_HELD_BACK):
        server.add(str(index), PROMPT)
    for _ in range(3 * MAX_HELD_BACK):
        server.step()
    assert not server.scheduler.has_work
    assert server.scheduler.cache.num_hits == 12 * (3 * MAX_HELD_BACK - 1)


def test_other_salts_share_nothing():
    server = Server()
    assert server.run("a", PROMPT, salt="x") == 0
    assert server.run("b", PROMPT, salt="y") == 0
    assert server.run("c", PROMPT) == 0
    assert server.run("d", PROMPT, salt="x") == 12


def test_prompt_logprobs_compute_every_position_and_leave_it_for_others():
    server = Server()
    server.run("a", PROMPT)
    assert server.run("b", PROMPT, prompt_logprobs=0) == 0
    assert server.scheduler.cache.num_queries == 13
    fresh = Server()
    fresh.run("a", PROMPT, prompt_logprobs=0)
    assert fresh.run("b", PROMPT) == 12


def test_prompt_logprobs_that_were_sent_are_not_computed_again():
    server = Server()
    server.run("a", PROMPT)
    before = server.model.num_tokens
    server.run("b", PROMPT, max_tokens=2, prompt_logprobs=0, emitted=server.tokens("a"))
    assert server.model.num_tokens - before == 2, "13 prompt tokens and 1 emitted; 12 are found"


def test_a_request_with_invalid_logits_leaves_nothing_behind():
    server = Server()
    server.add("broken", PROMPT)
    batch = server.scheduler.schedule()
    server.model.execute(batch)
    server.scheduler.launched(batch)
    assert (
        server.scheduler.commit(batch, StepOutput.of(batch, [-1])).outputs()[0].finish_reason
        == "error"
    )
    assert server.run("b", PROMPT) == 0


def test_switched_off():
    server = Server(caching=False)
    server.run("a", PROMPT)
    assert server.run("b", PROMPT) == 0 and server.scheduler.cache.num_queries == 0


def test_a_preempted_request_finds_its_own_blocks():
    server = Server(num_blocks=6)
    server.add("old", [1, 2, 3, 4, 5], max_tokens=12)
    server.add("young", [6, 5, 4, 3, 2, 1, 0], max_tokens=12)
    while not server.scheduler.num_preemptions:
        server.step()
    (young,) = server.scheduler.waiting
    known, before = young.num_tokens, server.model.num_tokens
    server.finish()
    alone = Server()
    alone.run("young", [6, 5, 4, 3, 2, 1, 0], max_tokens=12)
    assert server.tokens("young") == alone.tokens("young")
    assert server.model.num_tokens - before < known + 12, "it started from its first token again"
    assert server.scheduler.cache.num_queries == 12, "only a first start counts"


def test_a_prompt_that_fits_only_by_sharing_is_admitted():
    server = Server(num_blocks=8)
    server.add("a", PROMPT * 2, max_tokens=3)  # 7 blocks of 8
    server.step()
    server.add("b", [*PROMPT * 2, 3], max_tokens=1)
    server.step()
    assert len(server.scheduler.running) + ("b" in server.outputs) == 2
    server.finish()


prompts = st.tuples(
    st.sampled_from([PROMPT * 2, [2] * 20, list(range(VOCAB)) * 3, []]),
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
).map(lambda parts: parts[0][: parts[1]] + parts[2])
arrivals = st.tuples(prompts, st.integers(1, 14), st.sampled_from(["", "salt"]), st.integers(-1, 1))
events = st.lists(st.one_of(arrivals, st.just("step"), st.integers(0, 25)), max_size=60)


@settings(max_examples=150)
@given(
    events,
    st.integers(11, 24),
    st.sampled_from([3, 16, 64]),
    st.sampled_from(
        [(None, None), (1, None), (2, None), (6, None), (30, None), (None, 0), (None, 1), (None, 9)]
    ),
    st.sampled_from([0, 1, 5, 64]),
)
def test_tokens_are_the_same_with_and_without(events, num_blocks, budget, layers, prefill_cap):
    """The cache, and a cap on prompt tokens. `layers`: their largest window, and the snapshots of their states."""
    num_blocks += 0 if layers[0] is None else 11
    servers = [
        Server(num_blocks, caching, *layers, cap, max_num_batched_tokens=budget)
        for caching, cap in ((True, prefill_cap), (False, 0))
    ]
    aborted = set()
    for server in servers:
        for number, event in enumerate(events):
            if event == "step":
                server.step()
            elif isinstance(event, int):
                if server.scheduler.abort(str(event)):
                    aborted.add(str(event))
            else:
                prompt, max_tokens, salt, priority = event
                server.add(str(number), prompt, max_tokens, salt, priority)
        server.finish()
        assert server.scheduler.cache.pool.usage == 0
    cached, plain = servers
    for name in {*cached.outputs, *plain.outputs} - aborted:
        assert cached.tokens(name) == plain.tokens(name)


def test_a_prefix_with_windows_needs_the_last_blocks_of_the_window_alone():
    """A window of 6 tokens: the block before a block border and the one before that."""
    server = Server(window=6)
    assert server.run("a", PROMPT) == 0
    assert server.run("b", PROMPT) == 12
    keys = [key + b"w" for key in chain_keys(root_key(""), PROMPT, BLOCK)]
    server.scheduler.cache.pool.forget(keys[:1])
    assert server.run("c", PROMPT) == 12
    server.scheduler.cache.pool.forget(keys[2:])
    assert server.run("d", PROMPT) == 0, "8 tokens are not reusable: their window begins in block 0"
    assert server.run("e", PROMPT) == 12, "computed again"


def test_a_long_prompt_does_not_hold_blocks_that_no_window_touches():
    server = Server(64, window=6, max_num_batched_tokens=8)
    server.add("a", PROMPT * 4, max_tokens=8)
    most = 0
    while server.scheduler.has_work:
        server.step()
        for seq in server.scheduler.running:
            whole, window = (blocks_of(server.scheduler, seq, k) for k in (FullGroup, WindowGroup))
            most = max(most, len(window))
            assert len(window) <= server.scheduler.cache.demand.window_blocks
            assert server.scheduler.cache.pool.num_free == 64 - len(whole) - len(window)
    assert most == 4 and server.scheduler.cache.pool.usage == 0


@pytest.mark.parametrize("layers", [(None, None), (5, None), (40, None), (None, 3), (None, 30)])
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_many_turns_of_many_chats_in_a_small_cache(num_blocks, layers):
    """Hits, evictions and preemptions by the hundred, and the tokens of a server without cache.

    `layers`: their largest window, and the snapshots of their states.
    """
    num_blocks *= 1 if layers[0] is None else 2
    servers = [Server(num_blocks, caching, *layers, max_num_seqs=3) for caching in (True, False)]
    for server in servers:
        chats = [[chat % VOCAB] * 5 for chat in range(12)]
        for turn in range(4):
            for index, chat in enumerate(chats):
                server.add(f"{turn} {index}", list(chat), max_tokens=8)
            server.finish()
            for index, chat in enumerate(chats):
                chat += [*server.tokens(f"{turn} {index}"), index % VOCAB]
    cached, plain = servers
    assert {name: cached.tokens(name) for name in cached.outputs} == {
        name: plain.tokens(name) for name in plain.outputs
    }
    assert cached.model.num_tokens < plain.model.num_tokens
    assert cached.scheduler.cache.num_hits > 0
