"""The block manager under random histories: nothing leaked, freed twice or mixed up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ludus.engine import BlockManager, BlockPool, BlockTable
from ludus.engine.embedded.block_manager import common_prefix

BLOCK_SIZE = 4
tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=22)


class BlockHistories(RuleBasedStateMachine):
    """Contexts come, grow, fork and go; `memory` stands for what the blocks really contain."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, list[tuple[int, ...]]] = {}
        self.block_manager = BlockManager(12, BLOCK_SIZE, self.copy_block)
        self.version = 0
        self.held: list[tuple[BlockTable, list[int]]] = []

    def copy_block(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    def compute(self, block_table: BlockTable, tokens: list[int], stop: int) -> None:
        """Write into each slot everything a real key depends on: version and prefix."""
        for position in range(block_table.length, stop):
            block = block_table.blocks[position // BLOCK_SIZE]
            slots = self.memory.setdefault(block, [()] * BLOCK_SIZE)
            slots[position % BLOCK_SIZE] = (self.version, *tokens[: position + 1])
        block_table.length = stop
        self.block_manager.publish(block_table, tokens, stop)

    @rule(tokens=tokens_lists)
    def start(self, tokens: list[int]) -> None:
        block_table = self.block_manager.reuse(tokens, BlockTable(), [])
        if self.block_manager.grow(block_table, len(tokens)):
            self.compute(block_table, tokens, len(tokens))
            self.held.append((block_table, tokens))
        else:
            self.block_manager.drop(block_table)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=tokens_lists, cut=st.integers(0, 30))
    def take_over(self, data: st.DataObject, more: list[int], cut: int) -> None:
        block_table, tokens = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        following = tokens[:cut] + more
        fresh = self.block_manager.reuse(following, block_table, tokens)
        assert fresh.length < len(following)
        if self.block_manager.grow(fresh, len(following)):
            self.compute(fresh, following, len(following))
            self.held.append((fresh, following))
        else:
            self.block_manager.drop(fresh)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        block_table, tokens = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        copy = self.block_manager.fork(block_table)
        self.held.append((copy, tokens[: copy.length]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block_table, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.block_manager.drop(block_table)

    @rule()
    def change_weights(self) -> None:
        for block_table, _ in self.held:
            self.block_manager.drop(block_table)
        self.held.clear()
        self.version += 1
        self.block_manager.set_version(self.version)

    @invariant()
    def reference_counts_are_right(self) -> None:
        self.block_manager.pool.check()
        holders = [block for block_table, _ in self.held for block in block_table.blocks]
        for block in range(12):
            assert self.block_manager.pool.references(block) == holders.count(block)

    @invariant()
    def blocks_contain_what_their_holder_believes(self) -> None:
        for block_table, tokens in self.held:
            for position in range(block_table.length):
                slot = self.memory[block_table.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                assert slot == (self.version, *tokens[: position + 1])


TestBlockHistories = BlockHistories.TestCase
TestBlockHistories.settings = settings(stateful_step_count=40)


def test_misuse_of_the_pool_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert block is not None
    pool.release(block)
    for misuse in (pool.release, pool.share, lambda p: pool.publish(p, b"x")):
        with pytest.raises(ValueError, match="block"):
            misuse(block)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    for name in (b"a", b"b", b"c"):
        block = pool.allocate()
        assert block is not None
        pool.publish(block, name)
        pool.release(block)
    kept = pool.find(b"a")
    assert kept is not None
    pool.share(kept)
    pool.release(kept)
    assert pool.allocate() is not None
    assert (pool.find(b"a"), pool.find(b"b")) == (kept, None)


@given(tokens_lists, tokens_lists)
def test_common_prefix(left: list[int], right: list[int]) -> None:
    count = common_prefix(left, right)
    assert left[:count] == right[:count]
    assert left[count : count + 1] != right[count : count + 1] or count == min(len(left), len(right))
