"""States beside KV, for models with layers that keep a state (`model/state_layers.py`).

A state lives in a slot as keys and values live in blocks. `StateCache` is the slots' memory;
`StateBlockManager` says which context has which slot. A block table owns one slot, whose states are those after
exactly the table's `length` tokens. Unlike KV, a state cannot be cut to an earlier token. So *snapshots* are
kept, copies of a slot at a block's end, found by the block's hash: at the end of a prompt (the last block's end
before its last token), for the other attempts of its group; and where a prompt leaves what it has in common
with earlier ones, such as a system prompt. A prompt's chunks end where a snapshot is to be taken, which is done
when the next step is planned. A request that finds the blocks of one that is not taken yet waits that step.

So of a prefix that is found in blocks only as much is used as there is a state for: the held slot, if all of
its tokens go on; else the longest snapshot; else nothing. When no slot is free the least recently used snapshot
goes, then the session that has been idle for longest; without either, requests wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ludus.engine.embedded.block_manager import BlockManager, BlockTable, common_prefix
from ludus.model.state_layers import LayerStates, StateKey, StateShapes


class StateCache:
    """The states of every layer, each [slots, ...]; grows with the slots in use."""

    def __init__(self, shapes: StateShapes, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._shapes = shapes
        self._device = device
        self._size = 0
        self._layers: dict[nn.Module, dict[StateKey, Tensor]] = {}

    def read(self, layer: nn.Module, slots: Tensor | slice) -> LayerStates:
        """The layer's states in these slots; of a slice in place."""
        return LayerStates({key: states[slots] for key, states in self._layers[layer].items()})

    def write(self, layer: nn.Module, slots: Tensor | slice, states: LayerStates) -> None:
        """Keep what has become of the states that `read` gave."""
        for key, kept in self._layers[layer].items():
            given = states.tensors[key]
            if isinstance(slots, slice):
                if given.data_ptr() != kept[slots].data_ptr():
                    kept[slots] = given
            else:
                kept.index_copy_(0, slots, given.to(kept.dtype))

    def zero(self, slot: int) -> None:
        """The state of a context that begins."""
        self._ensure(slot)
        for states in self._every():
            states[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy one slot in every layer."""
        self._ensure(target)
        for states in self._every():
            states[target] = states[source]

    def clear(self) -> None:
        """Zero everything."""
        for states in self._every():
            states.zero_()

    def free(self) -> None:
        """Free the memory; what it held is lost."""
        self._layers.clear()
        self._size = 0

    def _every(self) -> list[Tensor]:
        return [states for own in self._layers.values() for states in own.values()]

    def _ensure(self, slot: int) -> None:
        if slot < self._size:
            return
        size = min(self.slots, max(slot + 1, 2 * self._size, 8))
        for layer, shapes in self._shapes.items():
            before = self._layers.get(layer, {})
            self._layers[layer] = {}
            for key, (shape, dtype) in shapes.items():
                states = torch.zeros(size, *shape, dtype=dtype, device=self._device)
                if key in before:
                    states[: self._size] = before.pop(key)
                self._layers[layer][key] = states
        self._size = size


class Slots(Protocol):
    """The memory that a `StateBlockManager` tells what to do."""

    slots: int

    def zero(self, slot: int) -> None: ...

    def copy(self, source: int, target: int) -> None: ...


class StateBlockManager(BlockManager):
    """Block tables that own the slot of a state, and the snapshots that they begin from."""

    def __init__(
        self, blocks: int, block_size: int, copy_block: Callable[[int, int], None], states: Slots
    ) -> None:
        self._states = states
        self._free = list(range(states.slots - 1, -1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._due: dict[bytes, tuple[BlockTable, int]] = {}  # to be taken when the step is over
        super().__init__(blocks, block_size, copy_block)

    def set_version(self, version: int) -> None:
        super().set_version(version)
        self._free.extend(self._snapshots.values())
        self._snapshots.clear()
        self._due.clear()

    def begin_step(self) -> None:
        """Take the snapshots of the step that is over."""
        for block_hash, (table, length) in self._due.items():
            if table.slot is None or table.length != length or block_hash in self._snapshots:
                continue
            slot = self._take()
            if slot is not None:
                self._states.copy(table.slot, slot)
                self._snapshots[block_hash] = slot
        self._due.clear()

    def can_begin(self, held: BlockTable) -> bool:
        return held.slot is not None or bool(self._free or self._snapshots)

    def chunk(self, table: BlockTable, count: int) -> int:
        """A chunk ends where a snapshot is to be taken; no more is computed in the step that gets there."""
        if any(table is other for other, _ in self._due.values()):
            return 0
        return min(count, table.marks[0] - table.length) if table.marks else count

    def reuse(
        self,
        tokens: Sequence[int],
        held: BlockTable,
        held_tokens: Sequence[int],
        prompt: int | None = None,
    ) -> BlockTable | None:
        """As much of a prefix as there is a state for; None where there will be more of it in the next step."""
        common = min(common_prefix(tokens, held_tokens), held.length, len(tokens) - 1)
        hashes = list(held.hashes[: common // self.block_size])
        own = len(hashes)
        found = self._published(tokens, hashes)
        known = [n for n in range(1, len(hashes) + 1) if hashes[n - 1] in self._snapshots]
        kept = known[-1] if known else 0
        if held.slot is not None and common == held.length and common >= kept * self.block_size:
            slot, held.slot = held.slot, None
            table = self._truncated(held, common, hashes[:own])
            if table.length != common:
                raise AssertionError("a state is ahead of the keys and values beside it")
            table.slot = slot
            return table
        if any(block_hash in self._due for block_hash in hashes[kept:]):
            return None
        for block in found[: max(0, kept - own)]:
            self.pool.share(block)
        blocks = [*held.blocks[: min(own, kept)], *found[: max(0, kept - own)]]
        self._release(held.blocks[min(own, kept) :])
        table = BlockTable(blocks, kept * self.block_size, hashes[:kept])
        table.slot = self._slot_for(hashes[kept - 1] if kept else None, held)
        ends = {len(hashes), ((prompt or len(tokens)) - 1) // self.block_size}
        table.marks = [n * self.block_size for n in sorted(ends) if n > kept]
        return table

    def publish(self, block_table: BlockTable, tokens: Sequence[int], length: int) -> None:
        super().publish(block_table, tokens, length)
        while block_table.marks and block_table.marks[0] <= length:
            mark = block_table.marks.pop(0)
            if mark == block_table.length:
                self._due[block_table.hashes[mark // self.block_size - 1]] = block_table, mark

    def fork(self, block_table: BlockTable) -> BlockTable:
        copy = super().fork(block_table)
        if block_table.slot is not None and copy.length == block_table.length:
            copy.slot = self._take()
            if copy.slot is not None:
                self._states.copy(block_table.slot, copy.slot)
        return copy

    def drop(self, block_table: BlockTable) -> None:
        super().drop(block_table)
        if block_table.slot is not None:
            self._free.append(block_table.slot)
        block_table.slot, block_table.marks = None, []
        self._due = {key: due for key, due in self._due.items() if due[0] is not block_table}

    def check_slots(self, tables: Sequence[BlockTable]) -> None:
        """Raise unless every slot is free, a snapshot's, or of one of these tables, which are all."""
        held = [table.slot for table in tables if table.slot is not None]
        if sorted([*self._free, *self._snapshots.values(), *held]) != list(range(self._states.slots)):
            raise AssertionError("a slot was lost, or is in two states at once")

    def _slot_for(self, block_hash: bytes | None, held: BlockTable) -> int:
        """A slot that begins with a snapshot, or with nothing; `held` gives its own up."""
        slot, held.slot = held.slot, None
        if block_hash is not None:
            self._snapshots.move_to_end(block_hash)
        if slot is None:
            slot = self._take()
        if slot is None:
            raise AssertionError("a request was admitted without a slot for its state")
        if block_hash is None:
            self._states.zero(slot)
        elif (
            block_hash in self._snapshots
        ):  # else it was the only one, and its slot is the request's now
            self._states.copy(self._snapshots[block_hash], slot)
        return slot

    def _take(self) -> int | None:
        """A free slot, or that of the least recently used snapshot."""
        if self._free:
            return self._free.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None
