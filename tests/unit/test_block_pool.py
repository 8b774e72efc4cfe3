"""The block pool against a model that remembers what every block holds, and the keys of blocks."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv_cache.block_pool import BlockPool, chain_keys, root_key

NUM_BLOCKS = 6


def test_a_released_block_is_free_when_nobody_else_holds_it():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 3 and pool.usage == pytest.approx(0.25)
    pool.release(blocks[:1])
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="not held"):
        pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="is free"):
        pool.share(blocks[:1])
    with pytest.raises(AssertionError, match="5 blocks wanted"):
        pool.allocate(5)


def test_only_a_held_block_gets_a_key_and_only_one():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    with pytest.raises(AssertionError, match="has a key already"):
        pool.register(block, b"b")
    with pytest.raises(AssertionError, match="is free"):
        pool.register(1 - block, b"b")


def test_a_released_block_is_found_until_its_room_is_needed():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    for block, key in zip(blocks, (b"a", b"b"), strict=True):
        pool.register(block, key)
    pool.release(blocks)
    assert pool.num_free == 3 and pool.usage == 0
    assert pool.find([b"a", b"b", b"c"]) == blocks and pool.find([b"x", b"a"]) == []
    assert pool.num_free_besides(blocks) == 1
    pool.share(blocks)
    assert pool.num_free == 1 and pool.num_free_besides(blocks) == 1
    pool.release(blocks)
    pool.allocate(3)
    assert pool.find([b"a"]) == []


def test_room_comes_from_empty_blocks_then_from_tails_then_from_prefixes():
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for blocks, name in ((old, "old"), (new, "new")):
        for index, block in enumerate(blocks):
            pool.register(block, f"{name}{index}".encode())
    pool.release(old)
    pool.release(new)
    pool.share(old[:1])  # used once more: now the youngest
    pool.release(old[:1])

    def there() -> list[str]:
        names = ("old0", "old1", "new0", "new1")
        return [name for name in names if pool.find([name.encode()])]

    left = []
    for _ in range(5):
        pool.allocate(1)
        left.append(there())
    assert left == [
        ["old0", "old1", "new0", "new1"],
        ["old0", "new0", "new1"],
        ["old0", "new0"],
        ["old0"],
        [],
    ]


def test_equal_contents_keep_one_block_and_the_other_goes_back_empty():
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], b"a")
    pool.register(second[0], b"a")
    assert pool.find([b"a"]) == first
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == second and pool.find([b"a"]) == first


def test_forgotten_blocks_are_not_found_but_still_held():
    pool = BlockPool(3)
    held, free = pool.allocate(1), pool.allocate(1)
    pool.register(held[0], b"held")
    pool.register(free[0], b"free")
    pool.release(free)
    pool.forget([b"held", b"unknown", b"free"])
    assert pool.find([b"held"]) == pool.find([b"free"]) == [] and pool.num_free == 2
    pool.release(held)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_keys_tell_blocks_positions_prefixes_and_salts_apart():
    root = root_key("")
    keys = chain_keys(root, [1, 2, 1, 2, 1, 2, 9], 2)
    assert len(set(keys)) == 3  # equal tokens, other places; the rest is no full block
    assert chain_keys(keys[0], [1, 2], 2) == keys[1:2]
    assert chain_keys(root, [1], 2) == chain_keys(root, [], 2) == []
    assert chain_keys(root_key("mine"), [1, 2], 2) != keys[:1]
    assert chain_keys(root, [1, 3], 2) != keys[:1]
    # A salt cannot be made to continue somebody's chain.
    parent, token = b"\0" * 32, b"A\0\0\0"
    assert [root_key((parent + token).decode())] != chain_keys(parent, list(token[:1]), 1)
    root_key("\ud800")  # half a character is a salt, not a crash


class PoolMachine(RuleBasedStateMachine):
    """Random holders; `contents` has the last key of each block, `holders` the blocks of each holder."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    def held(self) -> set[int]:
        return {block for blocks in self.holders for block in blocks}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count):
        if count > self.pool.num_free:
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not self.held() & set(blocks)
        for block in blocks:
            self.contents.pop(block, None)  # written over
        self.holders.append(blocks)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def write(self, data, key):
        block = data.draw(st.sampled_from(sorted(self.held())))
        if block not in self.contents:  # a written block is never written again
            self.contents[block] = key
            self.pool.register(block, key)

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True))
    def look_up_and_share(self, keys):
        found = self.pool.find(keys)
        assert [self.contents[block] for block in found] == keys[: len(found)]
        free = self.pool.num_free_besides(found)
        self.pool.share(found)
        assert self.pool.num_free == free
        self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data):
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.forget([self.contents[block] for block in blocks if block in self.contents])

    @invariant()
    def free_is_what_nobody_holds(self):
        assert self.pool.num_free == NUM_BLOCKS - len(self.held())

    @invariant()
    def references_have_owners(self):
        owners = Counter(block for blocks in self.holders for block in blocks)
        self.pool.check_integrity(owners)
        assert not list(self.pool._differences(owners))

    @invariant()
    def no_key_is_lost_to_a_held_block(self):
        for key in set(self.contents.values()):
            for block in self.pool.find([key]):
                assert self.contents[block] == key


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40)
