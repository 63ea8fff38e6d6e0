"""The KV cache's blocks: reference counts, prefix caching, and the block table of each request and session.

Pure bookkeeping: a block is a number. `BlockPool` counts references. A block is free, in use (one reference or
more), or cached: without references, but findable by its hash; the least recently used cached block is
evicted when no block is free. `BlockManager` builds block tables over the pool.

Prefix caching: a full block is published under the hash of (policy version, all tokens before it, its own
tokens), so any context with the same prefix finds it. A prompt's blocks are published when they are scheduled,
not when they are computed: within a forward pass each layer writes all keys and values before it reads any, so
the members of a group that arrive together compute their common prompt once. Blocks that decoding fills are
published one step later, because a step computes its prompts before it decodes, and only when all of their
tokens are known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np


class BlockPool:
    """Reference counts, the hash index and the free list of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references = [0] * blocks
        self._free: list[int] = []
        self._untouched = 0  # blocks from here on were never used: memory follows the high-water mark
        self._hash_of: dict[int, bytes] = {}
        self._block_by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many blocks `allocate` can still give."""
        return len(self._free) + self.blocks - self._untouched + len(self._cached)

    @property
    def high_water(self) -> int:
        """One more than the highest block ever used."""
        return self._untouched

    def references(self, block: int) -> int:
        """How many references there are to this block."""
        return self._references[block]

    def allocate(self) -> int | None:
        """A block with one reference; None when every block is in use. May evict a cached block."""
        if self._free:
            block = self._free.pop()
        elif self._untouched < self.blocks:
            block = self._untouched
            self._untouched += 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._block_by_hash[self._hash_of.pop(block)]
        else:
            return None
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; without any, a published block stays cached and any other is free."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} has no reference and cannot be released")
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make this full block findable by its hash. The first block with a hash stays the one."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} has no reference and cannot be published")
        if block_hash not in self._block_by_hash and block not in self._hash_of:
            self._block_by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def find(self, block_hash: bytes) -> int | None:
        """The block with this hash, if any; without a reference yet."""
        return self._block_by_hash.get(block_hash)

    def is_writable(self, block: int) -> bool:
        """Whether it may be written: one reference, and not published."""
        return self._references[block] == 1 and block not in self._hash_of

    def unpublish_all(self) -> None:
        """Unpublish every block; cached ones become free, those in use stay in use."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._block_by_hash.clear()

    def check(self) -> None:
        """Raise if a block is in two states, lost, or indexed wrongly."""
        held = {block for block, count in enumerate(self._references) if count > 0}
        free, cached = set(self._free), set(self._cached)
        untouched = set(range(self._untouched, self.blocks))
        if len(free) != len(self._free) or free & held or free & cached or cached & held:
            raise AssertionError("a block is in two states at once")
        if free | cached | held | untouched != set(range(self.blocks)) or untouched & (
            free | cached | held
        ):
            raise AssertionError("a block was lost")
        if not cached <= set(self._hash_of) <= cached | held:
            raise AssertionError("a block without a hash is cached, or a free one can be found")
        if {block: block_hash for block_hash, block in self._block_by_hash.items()} != self._hash_of:
            raise AssertionError("the hash index disagrees with itself")


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one context, in order."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    """How many tokens have their keys and values in the blocks, or in steps in flight."""
    hashes: list[bytes] = field(default_factory=list)
    """One for each full block that has been published."""
    slot: int | None = None
    """Where its recurrent states are, of a model that has such (`state_cache.py`)."""
    marks: list[int] = field(default_factory=list)
    """Lengths at which a snapshot of the states is to be taken, in order."""


class BlockManager:
    """Allocates, reuses, forks and releases block tables."""

    def __init__(self, blocks: int, block_size: int, copy_block: Callable[[int, int], None]) -> None:
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self._copy_block = copy_block
        self._root = b""
        self.set_version(0)

    def set_version(self, version: int) -> None:
        """Blocks of other policy versions are not found from now on."""
        self.pool.unpublish_all()
        self._root = version.to_bytes(8, "big")

    def resize(self, blocks: int) -> None:
        """Another number of blocks; none may be in use."""
        self.pool = BlockPool(blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def begin_step(self) -> None:
        """A step is planned, and those before it are over or in flight."""

    def can_begin(self, held: BlockTable) -> bool:
        """Whether a request may begin, as far as more than blocks is needed."""
        return True

    def chunk(self, table: BlockTable, count: int) -> int:
        """How many of the next `count` tokens of a prompt one step may compute."""
        return count

    def reuse(
        self,
        tokens: Sequence[int],
        held: BlockTable,
        held_tokens: Sequence[int],
        prompt: int | None = None,
    ) -> BlockTable | None:
        """A block table with the longest prefix of `tokens` that is held or published; takes `held` over.

        At least the last token is left to compute, because its hidden state is needed. `prompt` is how many of
        the tokens others may share. None, with `held` as it was, asks for another try in the next step.
        """
        common = min(common_prefix(tokens, held_tokens), held.length, len(tokens) - 1)
        hashes = list(held.hashes[: common // self.block_size])
        found = self._published(tokens, hashes)
        if found:
            full = len(hashes) - len(found)
            for block in found:
                self.pool.share(block)
            cached = held.blocks[:full]
            self._release(held.blocks[full:])
            return BlockTable(cached + found, len(hashes) * self.block_size, hashes)
        return self._truncated(held, common, hashes)

    def _published(self, tokens: Sequence[int], hashes: list[bytes]) -> list[int]:
        """The published blocks that follow those with `hashes`, to which theirs are added."""
        found: list[int] = []
        while len(hashes) < (len(tokens) - 1) // self.block_size:
            block_hash = self._hash(tokens, len(hashes), hashes)
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
            hashes.append(block_hash)
        return found

    def _truncated(self, held: BlockTable, length: int, hashes: list[bytes]) -> BlockTable:
        """`held` cut to `length` tokens; a partial last block that others read is copied."""
        needed = self.blocks_for(length)
        self._release(held.blocks[needed:])
        blocks = held.blocks[:needed]
        if length % self.block_size and not self.pool.is_writable(blocks[-1]):
            fresh = self.pool.allocate()
            if fresh is not None:
                self._copy_block(blocks[-1], fresh)
            self._release([blocks.pop()])
            if fresh is None:
                length = len(blocks) * self.block_size
            else:
                blocks.append(fresh)
        return BlockTable(blocks, length, hashes)

    def grow(self, block_table: BlockTable, tokens: int) -> bool:
        """Blocks for `tokens` tokens in all; False, and nothing taken, when there are not enough."""
        missing = self.blocks_for(tokens) - len(block_table.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.available:
            return False
        for _ in range(missing):
            block = self.pool.allocate()
            if block is None:
                raise AssertionError("the pool has fewer blocks than it said")
            block_table.blocks.append(block)
        return True

    def publish(self, block_table: BlockTable, tokens: Sequence[int], length: int) -> None:
        """Let others find the blocks that the first `length` tokens have filled; these must be known."""
        while (len(block_table.hashes) + 1) * self.block_size <= length:
            index = len(block_table.hashes)
            block_hash = self._hash(tokens, index, block_table.hashes)
            self.pool.publish(block_table.blocks[index], block_hash)
            block_table.hashes.append(block_hash)

    def fork(self, block_table: BlockTable) -> BlockTable:
        """A second block table of the same content: full blocks shared, the partial one copied."""
        full = block_table.length // self.block_size
        blocks = block_table.blocks[:full]
        for block in blocks:
            self.pool.share(block)
        length = full * self.block_size
        if block_table.length > length:
            fresh = self.pool.allocate()
            if fresh is not None:
                self._copy_block(block_table.blocks[full], fresh)
                blocks = [*blocks, fresh]
                length = block_table.length
        return BlockTable(list(blocks), length, list(block_table.hashes[:full]))

    def drop(self, block_table: BlockTable) -> None:
        """Release all blocks; the block table is empty afterwards."""
        self._release(block_table.blocks)
        block_table.blocks, block_table.length, block_table.hashes = [], 0, []

    def _release(self, blocks: Sequence[int]) -> None:
        # Last blocks first: eviction then shortens a cached prefix from its end.
        for block in reversed(blocks):
            self.pool.release(block)

    def _hash(self, tokens: Sequence[int], index: int, hashes: Sequence[bytes]) -> bytes:
        parent = hashes[index - 1] if index else self._root
        own = np.array(tokens[index * self.block_size : (index + 1) * self.block_size], dtype=np.int64)
        return blake2b(own.tobytes(), digest_size=16, key=parent).digest()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two contexts share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
