"""Sampling attention over the paged KV cache, and the cache of plain torch.

New tokens of many requests attend at once; their keys and values live in blocks. `PagedContext` gathers blocks
and works everywhere. `DecodeContext` and `PrefillContext` read blocks in place, by kernels (or their torch
twins).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.engine.embedded.state_cache import StateCache
from ludus.kernels import paged_decode, paged_prefill, rotate_and_store
from ludus.kernels.layers import store_kv
from ludus.model.attention import (
    AttentionParams,
    LookAhead,
    StackedAttentionContext,
    attend,
    attend_once,
    positional_mask,
    split_by_length,
)
from ludus.model.kv_layers import KVPlaces, Place
from ludus.model.state_layers import StateCall

if TYPE_CHECKING:
    from ludus.engine.embedded.cuda.kv_cache import StaticKVCache


class KVCache(Protocol):
    """Interface of a KV cache's memory."""

    block_size: int

    @property
    def is_allocated(self) -> bool:
        """Whether it has memory now."""

    def acquire(self) -> int:
        """Allocate memory; for how many blocks."""

    def release(self) -> None:
        """Free the memory until `acquire`; what it held is lost."""

    def halve(self) -> bool:
        """Free the memory and halve its size; False if that would leave too little."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in every layer."""

    def clear(self) -> None:
        """Zero everything: a NaN in a block would spoil its next owner."""

    def free(self) -> None:
        """Free all memory for good."""


class TorchKVCache:
    """The blocks of every layer, each [blocks, Hkv, block_size, D]; grows with the blocks in use.

    Layers may have different heads, and keys of another size than values.

    Heads come before positions, so that a run of blocks, gathered head by head, is at once the contiguous
    [B, Hkv, length, D] that batched products want.
    """

    def __init__(self, blocks: int, block_size: int, states: StateCache | None = None) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.states = states
        self._layers: dict[Place, tuple[Tensor, Tensor]] = {}
        self._size = 0
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def is_allocated(self) -> bool:
        return True

    def acquire(self) -> int:
        return self.blocks

    def release(self) -> None:
        self.free()

    def halve(self) -> bool:
        return False

    def ensure(self, blocks: int) -> None:
        """Allocate the first `blocks` blocks."""
        if blocks > self._size:
            self._size = min(self.blocks, max(blocks, 2 * self._size, 64))
            self._layers = {
                layer: (_grown(keys, self._size), _grown(values, self._size))
                for layer, (keys, values) in self._layers.items()
            }

    def blocks_of(self, place: Place) -> tuple[Tensor, Tensor]:
        """A layer's (keys, values)."""
        return self._layers[place]

    def write(self, place: Place, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Write states [T, Hkv, D] to rows [T * Hkv] of the flattened blocks; the layer's (keys, values)."""
        if place not in self._layers:
            self._layers[place] = (self._empty(key), self._empty(value))
        keys, values = self._layers[place]
        keys.view(-1, keys.shape[3]).index_copy_(0, rows, key.flatten(0, 1))
        values.view(-1, values.shape[3]).index_copy_(0, rows, value.flatten(0, 1))
        return keys, values

    def _empty(self, states: Tensor) -> Tensor:
        return states.new_zeros(self._size, states.shape[1], self.block_size, states.shape[2])

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys in a layer; a guess before anything was written."""
        layer = next(iter(self._layers.values()), None)
        return 512 if layer is None else layer[0][0, :, 0].nbytes

    def gather(self, blocks: Tensor, index: Tensor, place: int) -> Tensor:
        """Copies of [block_size, D] pieces, in a buffer that the next gather at `place` overwrites."""
        pieces = blocks.flatten(0, 1)
        size = len(index) * pieces.shape[1] * pieces.shape[2]
        buffer = self._scratch.get((place, blocks.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = blocks.new_empty(size)
            self._scratch[place, blocks.dtype] = buffer
        out = buffer[:size].view(len(index), pieces.shape[1], pieces.shape[2])
        return torch.index_select(pieces, 0, index, out=out)

    def copy_block(self, source: int, target: int) -> None:
        self.ensure(target + 1)
        for keys, values in self._layers.values():
            keys[target] = keys[source]
            values[target] = values[source]

    def clear(self) -> None:
        for keys, values in self._layers.values():
            keys.zero_()
            values.zero_()
        if self.states is not None:
            self.states.clear()

    def free(self) -> None:
        if self.states is not None:
            self.states.free()
        self._layers.clear()
        self._scratch.clear()
        self._size = 0


def _grown(blocks: Tensor, size: int) -> Tensor:
    bigger = blocks.new_zeros(size, *blocks.shape[1:])
    bigger[: len(blocks)] = blocks
    return bigger


Ints = npt.NDArray[np.int64]

# At most this fraction of a padded group of rows is padding.
_PADDING = 0.2
# Bytes of a group's keys, and of its values: on a CPU what the nearest caches hold.
_GROUP_BYTES = {"cpu": 1 << 21}
_GROUP_BYTES_ELSEWHERE = 1 << 26


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """R rows with T new tokens in all, in flat order."""

    slots: Ints
    """[T] Where each new token's keys and values go: block * block_size + offset."""
    counts: Ints
    """[R] How many new tokens each row has."""
    lengths: Ints
    """[R] How many tokens each row's context has, the new ones included."""
    block_tables: Ints
    """[R, P] The blocks of each row, in order; what lies beyond its context is never read unmasked."""
    ahead: LookAhead | None = None
    """What the new tokens see, where that is more than themselves and what is before them."""
    states: Ints | None = None
    """[R] The slot of each row's recurrent states, where the model has such."""


@dataclass(slots=True)
class _PaddedRows:
    """Rows of similar shape."""

    rows: int
    width: int
    length: int
    index: Tensor | None
    """[rows * width] flat positions of the queries; None when they are all tokens in flat order."""
    blocks: Tensor
    """[rows, blocks per row]"""
    positions: Tensor
    """[rows, width] positions of the queries within their contexts."""
    ahead: LookAhead | None = None
    last: Tensor | None = None
    """[rows, width] the last position that each query sees, where that is not its own."""
    masks: dict[object, Tensor] = field(default_factory=dict)
    biases: dict[object, Tensor] = field(default_factory=dict)
    pieces: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, params: AttentionParams) -> Tensor:
        if params.reach not in self.masks:
            sees_ahead = self.ahead is not None and self.ahead.holds(params)
            last = self.last if sees_ahead else None
            self.masks[params.reach] = positional_mask(self.positions, self.length, params, last)
        return self.masks[params.reach]

    def bias(self, params: AttentionParams, dtype: torch.dtype) -> Tensor:
        if params.reach not in self.biases:
            mask = self.mask(params)[:, 0]
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self.biases[params.reach] = bias.masked_fill_(~mask, torch.finfo(dtype).min)
        return self.biases[params.reach]

    def piece_index(self, heads: int) -> Tensor:
        """Which [block_size, D] pieces of the cache make up [rows, heads, length, D]."""
        if heads not in self.pieces:
            self.pieces[heads] = _per_head(self.blocks, heads).flatten()
        return self.pieces[heads]


class PagedContext:
    """The attention context of a step: gathers the blocks of similar rows side by side for dense attention."""

    def __init__(self, batch: PagedBatch, kv_cache: TorchKVCache, device: torch.device) -> None:
        self._kv_cache = kv_cache
        self._batch, self._device = batch, device
        self._slots = torch.from_numpy(batch.slots).to(device)
        self._rows: dict[int, Tensor] = {}
        self._places = KVPlaces()
        starts_R = np.cumsum(batch.counts) - batch.counts
        self._groups: list[_PaddedRows] = []
        back_T = np.empty(len(batch.slots), dtype=np.int64)
        base = 0
        group_bytes = _GROUP_BYTES.get(device.type, _GROUP_BYTES_ELSEWHERE)
        for chosen in similar_rows(batch.counts, batch.lengths, group_bytes // kv_cache.token_bytes):
            counts, lengths = batch.counts[chosen][:, None], batch.lengths[chosen][:, None]
            width, blocks = int(counts.max()), -(-int(lengths.max()) // kv_cache.block_size)
            offsets = np.minimum(np.arange(width)[None, :], counts - 1)
            index = (starts_R[chosen][:, None] + offsets).reshape(-1)
            # Padding repeats a row's last query; whichever copy is read back, the result is the same.
            back_T[index] = base + np.arange(len(index))
            base += len(index)
            last: Tensor | None = None
            if batch.ahead is not None:
                last = torch.from_numpy(batch.ahead.last_T[index].reshape(-1, width)).to(device)
            self._groups.append(
                _PaddedRows(
                    rows=len(chosen),
                    width=width,
                    length=blocks * kv_cache.block_size,
                    index=torch.from_numpy(index).to(device),
                    blocks=torch.from_numpy(batch.block_tables[chosen, :blocks]).to(device),
                    positions=torch.from_numpy(lengths - counts + offsets).to(device),
                    ahead=batch.ahead,
                    last=last,
                )
            )
        self._back = torch.from_numpy(back_T).to(device)
        if len(self._groups) == 1 and np.array_equal(back_T, np.arange(base)):
            self._groups[0].index = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        place, is_written = self._places.of(layer, key, value)
        if is_written:
            keys, values = self._kv_cache.blocks_of(place)
        else:
            states = (key[0].transpose(0, 1), value[0].transpose(0, 1))
            keys, values = self._kv_cache.write(place, *states, self._slot_rows(key.shape[1]))
        return self._attend(query[0].transpose(0, 1), keys, values, params)[None]

    def _slot_rows(self, heads: int) -> Tensor:
        """Rows of the flattened blocks that the new tokens' heads go to."""
        if heads not in self._rows:
            size = self._kv_cache.block_size
            block, offset = self._slots // size, self._slots % size
            rows = _per_head(block[:, None], heads) * size + offset[:, None, None]
            self._rows[heads] = rows.flatten()
        return self._rows[heads]

    def run_state_layer(self, call: StateCall) -> Tensor:
        """A state layer over rows with as many new tokens as each other, from their states and into them."""
        states = self._kv_cache.states
        if states is None:
            raise AssertionError("a layer keeps a state, and there are no slots for it")
        groups, back = self._state_rows
        outputs: list[Tensor] = []
        for slots, index, rows, width in groups:
            own = states.read(call.module, slots)
            outputs.append(call.run(index, rows, width, own))
            states.write(call.module, slots, own)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (joined if back is None else joined.index_select(0, back))[None]

    @cached_property
    def _state_rows(self) -> tuple[list[tuple[Tensor | slice, Tensor | None, int, int]], Tensor | None]:
        """(slots, flat places, rows, width) of groups, and where each token lies in their concatenation."""
        counts, slots = self._batch.counts, self._batch.states
        if slots is None:
            raise AssertionError("the rows of this step have no slots")
        starts = np.cumsum(counts) - counts
        groups: list[tuple[Tensor | slice, Tensor | None, int, int]] = []
        places: list[Ints] = []
        for width in np.unique(counts):
            rows = np.flatnonzero(counts == width)
            rows = rows[np.argsort(slots[rows])]
            first, last = int(slots[rows[0]]), int(slots[rows[-1]])
            together = last - first == len(rows) - 1
            where = (
                slice(first, last + 1) if together else torch.from_numpy(slots[rows]).to(self._device)
            )
            places.append((starts[rows][:, None] + np.arange(width)).reshape(-1))
            index = torch.from_numpy(places[-1]).to(self._device)
            groups.append((where, index, len(rows), int(width)))
        order = np.concatenate(places)
        if np.array_equal(order, np.arange(len(order))) and len(groups) == 1:
            return [(groups[0][0], None, *groups[0][2:])], None
        return groups, torch.from_numpy(np.argsort(order)).to(self._device)

    def _attend(
        self, query_THD: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        outputs: list[Tensor] = []
        heads = keys.shape[1]
        for group in self._groups:
            query = query_THD if group.index is None else query_THD.index_select(0, group.index)
            query = query.view(group.rows, group.width, *query.shape[1:]).transpose(1, 2)
            key, value = (
                self._kv_cache.gather(blocks, group.piece_index(heads), place).view(
                    group.rows, heads, group.length, blocks.shape[3]
                )
                for place, blocks in enumerate((keys, values))
            )
            # Half precision stays with the fused kernel, which keeps its scores in single precision.
            if group.width == 1 and params.softcap is None and query.dtype == torch.float32:
                output = attend_once(query, key, value, params, group.bias(params, query.dtype))
            else:
                output = attend(query, key, value, params, group.mask(params))
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        if len(outputs) == 1 and self._groups[0].index is None:
            return outputs[0]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._back)


def _per_head(blocks: Tensor, heads: int) -> Tensor:
    """[R, heads, P] from blocks [R, P]: where each head's part of a block lies."""
    return blocks[:, None, :] * heads + torch.arange(heads, device=blocks.device)[None, :, None]


def similar_rows(counts_R: Ints, lengths_R: Ints, group_tokens: int) -> list[Ints]:
    """Rows grouped so that little of a padded group is padding: by new tokens, then by context."""
    groups: list[Ints] = []
    # Widths within a factor of two share a class; decoding rows (one new token) are one of their own.
    classes = np.ceil(np.log2(counts_R)).astype(np.int64)
    for width_class in np.unique(classes):
        rows = np.flatnonzero(classes == width_class)
        order = rows[np.argsort(-lengths_R[rows], kind="stable")]
        for first, stop in split_by_length(lengths_R[order], _PADDING, group_tokens):
            groups.append(np.sort(order[first:stop]))
    return groups


class _KernelContext(StackedAttentionContext):
    """Writes the new tokens' keys and values to their slots, then attends over the blocks."""

    def __init__(self, kv_cache: StaticKVCache, slots_T: Tensor) -> None:
        self._kv_cache = kv_cache
        self._slots_T = slots_T

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attention of a layer for Hugging Face modules, with rotated states [1, H, T, D]."""
        keys, values = self._kv_cache.blocks(layer)
        store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, self._slots_T)
        return self._read(query[0].transpose(0, 1), keys, values, params)[None]

    def attend_qkv(
        self,
        layer: int,
        qkv_TC: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        heads: int,
        kv_heads: int,
        params: AttentionParams,
    ) -> Tensor:
        """Attention of a layer for the fused forward: [T, Hq D] from stacked q, k, v before rotation."""
        keys, values = self._kv_cache.blocks(layer)
        query_THD = rotate_and_store(
            qkv_TC, cos_TD, sin_TD, heads, kv_heads, keys, values, self._slots_T
        )
        return self._read(query_THD, keys, values, params).flatten(1)

    def _read(self, query_THD: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        raise NotImplementedError


class DecodeContext(_KernelContext):
    """One new token a row. An idle row has length 0 and the spare slot."""

    def __init__(
        self, kv_cache: StaticKVCache, slots_R: Tensor, block_tables_RB: Tensor, lengths_R: Tensor
    ) -> None:
        super().__init__(kv_cache, slots_R)
        self._block_tables_RB = block_tables_RB
        self._lengths_R = lengths_R

    def _read(self, query_THD: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        return paged_decode(
            query_THD,
            keys,
            values,
            self._block_tables_RB,
            self._lengths_R,
            scaling=params.scaling,
            window=params.window,
            softcap=params.softcap,
        )


class PrefillContext(_KernelContext):
    """Several new tokens a row: row r has those from starts_R1[r] to starts_R1[r + 1]."""

    def __init__(
        self,
        kv_cache: StaticKVCache,
        slots_T: Tensor,
        block_tables_RB: Tensor,
        starts_R1: Tensor,
        lengths_R: Tensor,
    ) -> None:
        super().__init__(kv_cache, slots_T)
        self._block_tables_RB = block_tables_RB
        self._starts_R1 = starts_R1
        self._lengths_R = lengths_R

    def _read(self, query_THD: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        return paged_prefill(
            query_THD,
            keys,
            values,
            self._block_tables_RB,
            self._starts_R1,
            self._lengths_R,
            scaling=params.scaling,
            window=params.window,
            softcap=params.softcap,
        )
