"""Prefix caching for models with linear attention: where states are kept, and what goes on from them."""

import pytest

from tests.unit.other_place import OtherPlace, transfers_to
from tests.unit.schedulers import group_of, snapshots_of
from tests.unit.test_prefix_cache import PROMPT, Server
from workers.kv_cache.state_group import StateGroup
from workers.kv_cache.state_snapshots import StateSnapshots, independent
from workers.step.step_output import StepOutput


def test_a_state_is_kept_where_a_prompt_ends_and_where_two_part():
    server = Server(snapshots=4)
    assert server.run("a", PROMPT) == 0
    assert server.run("again", PROMPT) == 12, "behind the last full block"
    assert server.run("b", [*PROMPT[:9], 0, 0, 0, 0]) == 0, "its blocks are there, a state is not"
    assert server.run("c", [*PROMPT[:8], 3, 3, 3, 3, 3]) == 8
    assert (
        snapshots_of(server.scheduler.cache).num_kept == 4
        and snapshots_of(server.scheduler.cache).num_restored == 2
    )


def test_prompts_that_come_together_share_a_state_where_they_part():
    server = Server(snapshots=4, max_num_batched_tokens=16)
    for name, end in (("a", [1, 1, 1]), ("b", [2, 2, 2]), ("c", [3, 3, 3])):
        server.add(name, PROMPT[:12] * 2 + end)
    server.finish()
    assert [server.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 24, 24]


def test_a_prompt_that_runs_keeps_a_state_where_another_prompt_parts_from_it():
    server = Server(snapshots=8)
    server.run("before", [*PROMPT[:8], *[3] * 9])
    for name, end in (("a", 1), ("b", 2)):
        server.add(name, [*PROMPT, *PROMPT[:7], *[end] * 9])
    server.finish()  # the first step of a ends where it parts from the prompt before
    assert [server.outputs[name][0].num_cached_tokens for name in "ab"] == [0, 20]
    assert snapshots_of(server.scheduler.cache).num_kept == 5, (
        "behind 8 and 20 tokens, and each prompt"
    )


def test_the_next_turn_of_a_chat_goes_on_from_the_prompt_before():
    server = Server(snapshots=2)
    server.run("a", PROMPT, max_tokens=12)
    assert server.run("b", [*PROMPT, *server.tokens("a"), 1, 2, 3]) == 12


def test_the_longest_unused_state_is_replaced():
    server = Server(snapshots=2)
    for name, token in (("a", 1), ("b", 2)):
        server.run(name, [token] * 9)
    assert server.run("a2", [1] * 9) == 8
    server.run("c", [3] * 9)
    assert server.run("a3", [1] * 9) == 8 and server.run("b2", [2] * 9) == 0
    assert snapshots_of(server.scheduler.cache).num_kept == 2


def test_states_that_are_replaced_before_their_first_use_are_kept_seldom():
    """Chats in turn, more than there are snapshots: then a few of them are kept for long, and find theirs."""
    server, saved = Server(num_blocks=64, snapshots=4), []
    restored = []
    for turn in range(6):
        for chat in range(7):
            server.run(f"{turn} {chat}", [chat] * 9)
            saved.append(len(snapshots_of(server.scheduler.cache).copies))
        restored.append(snapshots_of(server.scheduler.cache).num_restored)
    assert restored[0] == 0 and restored[-1] >= 5
    assert sum(saved) < len(saved) / 2


def test_blocks_behind_the_last_state_are_evicted_first():
    """No request can start there, so that a few of them are worth less than the blocks before a state."""
    server = Server(num_blocks=12, snapshots=4)
    server.run("a", PROMPT, max_tokens=20)  # 8 blocks are full; a state is kept behind 3
    server.run("b", [6] * 25)  # takes 7 blocks
    assert server.run("c", PROMPT) == 12


def test_a_request_with_invalid_logits_leaves_no_state():
    server = Server(snapshots=4)
    server.add("broken", PROMPT)
    for token in ([], [-1]):
        batch = server.scheduler.schedule()
        server.model.execute(batch)
        server.scheduler.launched(batch)
        server.scheduler.commit(batch, StepOutput.of(batch, token))
    assert snapshots_of(server.scheduler.cache).num_kept == 0
    assert server.run("b", PROMPT) == 0


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_state_that_was_wanted_of_a_prompt_that_ends_early(end):
    server = Server(snapshots=4, max_num_batched_tokens=8)
    server.add("a", PROMPT * 3)
    server.step()
    server.add("b", PROMPT * 3)
    server.step()
    if end == "abort":
        server.scheduler.abort("a")
    else:
        server.scheduler._preempt_last()
    server.finish()
    assert (
        not group_of(server.scheduler.cache, StateGroup)._wanted
        and not server.scheduler.cache._coming
    )
    assert {name: server.tokens(name) for name in server.outputs}["b"] == server.tokens("b")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_that_ends_wants_no_more_states(chunked):
    """A prompt that is not split passes the place of the wanted state."""
    server = Server(
        snapshots=4, max_num_batched_tokens=8 if chunked else 64, chunked_prefill=chunked
    )
    server.add("a", PROMPT * 3)
    server.step()
    server.scheduler.abort("a")
    assert not group_of(server.scheduler.cache, StateGroup)._wanted


def test_a_prompt_that_ends_leaves_the_states_that_another_prompt_wants():
    server = Server(snapshots=4, max_num_batched_tokens=12)
    server.add("a", [1] * 9)  # 8 tokens, then its last token
    server.add("b", [2] * 20)
    server.step()
    server.scheduler.abort("a")
    server.finish()
    assert server.run("c", [2] * 20) == 16


def test_without_snapshots_nothing_is_found():
    server = Server(snapshots=0)
    server.run("a", PROMPT)
    assert server.run("b", PROMPT) == 0 and not server.scheduler.cache.num_queries


def test_a_load_gets_no_slot_that_the_copies_before_the_next_forward_read_or_fill():
    """It writes at once: the copies would take what it brings for another state, or replace it."""
    snapshots = StateSnapshots(5, 1)
    assert snapshots.save(b"a", 1) == 5
    assert snapshots.take() is None, "the state comes into the slot before the next forward"
    snapshots.copies.clear()
    snapshots.restore(b"a", 2)
    assert snapshots.take() is None, "a sequence starts from the slot in the next forward"
    snapshots.forget([b"a"])
    assert snapshots.take() is None
    assert snapshots.save(b"b", 1) == 5, "copies are made in their order"
    snapshots.copies.clear()
    assert snapshots.take() == 5 and snapshots.num_kept == 0
    snapshots.check_integrity([5])


def test_no_state_is_saved_before_the_copy_that_keeps_it(monkeypatch):
    """The same state was kept in the same slot before, and still waits to be saved."""
    monkeypatch.setattr("workers.kv_cache.transfers.BATCH_S", 1000.0)
    server, place = Server(snapshots=1), OtherPlace()
    cache = server.scheduler.cache
    transfers_to(place, cache)
    server.run("a", [1] * 9, max_tokens=2)
    server.run("b", [2] * 9, max_tokens=2)  # replaces the state of a
    server.add("again", [1] * 9)
    server.step()  # its state comes into the slot before the next forward

    def saved() -> list[int]:
        cache.save_all()
        return [it.place for transfer in place.open for it in transfer.items if it.is_state]

    assert snapshots_of(cache).copies == [(1, 5)] and saved() == []
    server.finish()
    assert saved() == [5]


def test_copies_that_depend_on_one_another_are_made_in_order():
    assert independent([(1, 7), (2, 8), (7, 3), (9, 8), (4, 8)]) == [
        ([1, 2], [7, 8]),
        ([7, 9], [3, 8]),
        ([4], [8]),
    ]
