"""The cache groups of a rank behind their manager: leaks are named, and another kind of memory is another class."""

from collections.abc import Callable

import pytest

from tests.unit.schedulers import blocks_of, group_of, make_scheduler, snapshots_of
from tests.unit.test_engine import Alone
from tests.unit.test_prefix_cache import BLOCK, PROMPT, Server
from workers.kv_cache.block_groups import FullGroup, WindowGroup
from workers.kv_cache.group import CacheGroup
from workers.kv_cache.manager import KVCacheManager
from workers.kv_cache.state_group import StateGroup
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.step.step_sync import LockstepError


def running(**kinds) -> Server:
    """A server with request a in the middle of its answer, and keys of its blocks in the cache."""
    server = Server(**kinds)
    server.add("a", PROMPT, max_tokens=9)
    for _ in range(3):
        server.step()
    server.scheduler.check_integrity()
    return server


def lose_free_block(cache: KVCacheManager) -> None:
    cache.pool._blank.remove(20)


def reference_without_owner(cache: KVCacheManager) -> None:
    cache.pool.allocate(1)


def owner_without_reference(cache: KVCacheManager) -> None:
    (held,) = group_of(cache, FullGroup).held.values()
    held.ids.append(held.ids[0])


def free_twice(cache: KVCacheManager) -> None:
    cache.pool._blank.append(20)


def lose_key(cache: KVCacheManager) -> None:
    cache.pool._block_of.popitem()


def lose_sequence(cache: KVCacheManager) -> None:
    group = group_of(cache, FullGroup)
    cache.pool.release(group.held.popitem()[1].ids)


def lose_slot(cache: KVCacheManager) -> None:
    snapshots_of(cache)._free.pop()


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (
            lose_free_block,
            r"block 20 has 0 references and 0 places in the lists of free blocks, expected 0 and 1",
        ),
        (
            reference_without_owner,
            r"block \d+ has 1 references and 0 places in .*, expected 0 and 1",
        ),
        (
            owner_without_reference,
            r"block 0 has 1 references and 0 places in .*, expected 2 and 0",
        ),
        (free_twice, r"block 20 has 0 references and 2 places in .*, expected 0 and 1"),
        (lose_key, r"the key of block \d finds block None"),
        (lose_sequence, r"FullGroup has 0 sequences, 1 are running; not in both: a"),
        (lose_slot, r"free slots \[.*\] and slots with snapshots \(5,\), expected 4 in all"),
    ],
)
def test_a_leak_is_named(leak: Callable[[KVCacheManager], None], named: str) -> None:
    server = running(snapshots=4)
    leak(server.scheduler.cache)
    with pytest.raises(AssertionError, match=named):
        server.scheduler.check_integrity()


@pytest.mark.parametrize("kind", ["_coming", "_wanted"])
def test_what_nothing_computes_is_not_awaited(kind: str) -> None:
    server = running(snapshots=4)
    server.finish()
    cache = server.scheduler.cache
    server.scheduler.check_integrity()
    getattr(cache if kind == "_coming" else group_of(cache, StateGroup), kind).add(b"key")
    with pytest.raises(AssertionError, match=r"1 (blocks|states) are .* that no sequence computes"):
        server.scheduler.check_integrity()


def test_a_rank_that_falls_asleep_with_a_leak_fails_with_its_name() -> None:
    alone = Alone()
    alone.submit("a")
    for _ in range(3):
        alone.engine.step()
    assert not alone.scheduler.has_work
    (block,) = alone.scheduler.cache.pool.allocate(1)
    alone.engine.stop()  # so that its sleep is short
    alone.engine._sleep()
    with pytest.raises(LockstepError, match=f"block {block} has 1 references .* expected 0"):
        alone.engine.step()
    assert alone.engine.failed


class EvenGroup(CacheGroup):
    """A later kind of memory: sequences start behind an even number of blocks alone."""

    batch_fields = ()

    def fields(self, rows, row_of_token, positions, max_blocks):
        return {}

    def find(self, keys):
        return len(keys) // 2 * 2, []

    def forget(self, keys):
        pass


@pytest.mark.parametrize("window", [None, 6])
def test_another_kind_of_memory_is_another_class(window: int | None) -> None:
    """The prefix is what all groups have: 12 tokens of blocks, of which the new kind has two."""
    server = Server(window=window)
    server.run("a", PROMPT)
    assert server.run("b", PROMPT) == 12
    server.scheduler.cache.groups.append(EvenGroup())
    assert server.run("c", PROMPT) == 8
    assert server.tokens("a") == server.tokens("b") == server.tokens("c")


def test_groups_agree_on_a_prefix_that_each_of_them_has() -> None:
    """The state is behind block 3; of the blocks before it the window lacks one, and an earlier state is kept."""
    snapshots = StateSnapshots(9, 4, min_gain=BLOCK)
    scheduler = make_scheduler(window=6, snapshots=snapshots)
    cache = scheduler.cache
    full, window = group_of(cache, FullGroup), group_of(cache, WindowGroup)
    keys = [bytes([number]) * 32 for number in range(4)]
    blocks = cache.pool.allocate(8)
    for key, whole, windowed in zip(keys, blocks[:4], blocks[4:], strict=True):
        cache.pool.register(whole, key + full.suffix)
        cache.pool.register(windowed, key + window.suffix)
    for count in (1, 3):
        snapshots.save(keys[count - 1], 1)
    assert cache._agree(keys)[0] == 3
    cache.pool.forget([keys[1] + window.suffix])
    assert cache._agree(keys)[0] == 1, "block 1 is in the window behind block 3 and behind block 2"


def test_blocks_that_a_sequence_holds_are_in_its_row() -> None:
    server = running(window=6)
    (seq,) = server.scheduler.running
    for kind in (FullGroup, WindowGroup):
        group, ids = group_of(server.scheduler.cache, kind), blocks_of(server.scheduler, seq, kind)
        held = group.held[seq]
        assert ids and group.table[seq.row, held.first : held.end].tolist() == ids
