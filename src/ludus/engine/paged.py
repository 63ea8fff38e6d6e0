"""Sampling attention: keys and values live in pages, and new tokens of many requests attend at once.

`KvStore` owns the memory, `PagedBatch` says where the new tokens of a step belong and what they read,
and `PagedContext` is the attention context over both. How the reading is done is a backend's business:
`GatherBackend` here works everywhere; a faster one for a device registers itself in `PAGED_BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.engine.dense import Rule, attend, positional_mask
from ludus.engine.packed import split_by_length

Ints = npt.NDArray[np.int64]

# Rows whose new tokens and contexts are of similar size share a padded block.
_PADDING = 0.2
# Keys of a block, and its values, take about this much: on a CPU what the nearest caches hold.
_BLOCK_BYTES = {"cpu": 1 << 21}
_BLOCK_BYTES_ELSEWHERE = 1 << 26


class KvStore:
    """The pages of every layer, each [pages, page_size, Hkv, D]. Memory follows the pages in use."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._size = 0
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    def ensure(self, pages: int) -> None:
        """Have memory for the first `pages` pages."""
        if pages > self._size:
            self._size = min(self.pages, max(pages, 2 * self._size, 64))
            self._layers = {
                layer: (_grown(keys, self._size), _grown(values, self._size))
                for layer, (keys, values) in self._layers.items()
            }

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Put [T, Hkv, D] states into their slots; the layer's pages."""
        if layer not in self._layers:
            shape = (self._size, self.page_size)
            self._layers[layer] = (
                key.new_zeros(*shape, *key.shape[1:]),
                value.new_zeros(*shape, *value.shape[1:]),
            )
        keys, values = self._layers[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, slots, value)
        return keys, values

    @property
    def token_bytes(self) -> int:
        """What the keys of one token take in a layer; a guess before anything was written."""
        keys = next(iter(self._layers.values()), None)
        return 512 if keys is None else keys[0][0, 0].nbytes

    def gather(self, pages: Tensor, index: Tensor, place: int) -> Tensor:
        """Copies of the pages in `index`, in a buffer that the next gather at `place` overwrites."""
        size = len(index) * pages[0].numel()
        buffer = self._scratch.get((place, pages.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = pages.new_empty(size)
            self._scratch[place, pages.dtype] = buffer
        out = buffer[:size].view(len(index), *pages.shape[1:])
        return torch.index_select(pages, 0, index, out=out)

    def copy_page(self, source: int, target: int) -> None:
        """Duplicate one page in every layer."""
        self.ensure(target + 1)
        for keys, values in self._layers.values():
            keys[target] = keys[source]
            values[target] = values[source]

    def free(self) -> None:
        """Give all memory back."""
        self._layers.clear()
        self._scratch.clear()
        self._size = 0

    def clear(self) -> None:
        """Overwrite everything: a NaN in a page would spoil whoever gets the page next."""
        for keys, values in self._layers.values():
            keys.zero_()
            values.zero_()


def _grown(pages: Tensor, size: int) -> Tensor:
    bigger = pages.new_zeros(size, *pages.shape[1:])
    bigger[: len(pages)] = pages
    return bigger


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """R rows with T new tokens in all, in flat order."""

    slots: Ints
    """[T] Where each new token's keys and values go: page * page_size + offset."""
    counts: Ints
    """[R] How many new tokens each row has."""
    lengths: Ints
    """[R] How many tokens each row's context has, the new ones included."""
    tables: Ints
    """[R, P] The pages of each row, in order; what lies beyond its context is never read unmasked."""


class PagedBackend(Protocol):
    """Reads a layer's pages for the new tokens of one batch."""

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """[T, Hq, D]: each new token's weighted values."""


BackendFactory = Callable[[PagedBatch, KvStore, torch.device], PagedBackend]


class PagedContext:
    """The attention context of one engine step."""

    def __init__(self, batch: PagedBatch, store: KvStore, device: torch.device) -> None:
        self._store = store
        self._slots = torch.from_numpy(batch.slots).to(device)
        factory = PAGED_BACKENDS.get(device.type, GatherBackend)
        self._backend = factory(batch, store, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self._store.write(
            layer, key[0].transpose(0, 1), value[0].transpose(0, 1), self._slots
        )
        return self._backend.attend(query[0].transpose(0, 1), keys, values, rule)[None]


@dataclass(slots=True)
class _Block:
    """Rows of similar shape."""

    rows: int
    width: int
    length: int
    index: Tensor | None
    """[rows * width] flat positions of the queries; None when they are all tokens in flat order."""
    pages: Tensor
    """[rows * pages per row]"""
    positions: Tensor
    """[rows, width] positions of the queries within their contexts."""
    masks: dict[int | None, Tensor]

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = positional_mask(self.positions, self.length, window)
        return self.masks[window]


class GatherBackend:
    """Copies the pages of similar rows side by side and runs dense attention over them."""

    def __init__(self, batch: PagedBatch, store: KvStore, device: torch.device) -> None:
        self._store = store
        starts_R = np.cumsum(batch.counts) - batch.counts
        self._blocks: list[_Block] = []
        back_T = np.empty(len(batch.slots), dtype=np.int64)
        base = 0
        block_bytes = _BLOCK_BYTES.get(device.type, _BLOCK_BYTES_ELSEWHERE)
        for chosen in similar_rows(batch.counts, batch.lengths, block_bytes // store.token_bytes):
            counts, lengths = batch.counts[chosen][:, None], batch.lengths[chosen][:, None]
            width, pages = int(counts.max()), -(-int(lengths.max()) // store.page_size)
            offsets = np.minimum(np.arange(width)[None, :], counts - 1)
            index = (starts_R[chosen][:, None] + offsets).reshape(-1)
            # Padding repeats a row's last query; whichever copy is read back, the result is the same.
            back_T[index] = base + np.arange(len(index))
            base += len(index)
            self._blocks.append(
                _Block(
                    rows=len(chosen),
                    width=width,
                    length=pages * store.page_size,
                    index=torch.from_numpy(index).to(device),
                    pages=torch.from_numpy(batch.tables[chosen, :pages].reshape(-1)).to(device),
                    positions=torch.from_numpy(lengths - counts + offsets).to(device),
                    masks={},
                )
            )
        self._back = torch.from_numpy(back_T).to(device)
        if len(self._blocks) == 1 and np.array_equal(back_T, np.arange(base)):
            self._blocks[0].index = None

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        outputs: list[Tensor] = []
        for block in self._blocks:
            query = query_THD if block.index is None else query_THD.index_select(0, block.index)
            query = query.view(block.rows, block.width, *query.shape[1:]).transpose(1, 2)
            key, value = (
                self._store.gather(pages, block.pages, place)
                .view(block.rows, block.length, *pages.shape[2:])
                .transpose(1, 2)
                for place, pages in enumerate((keys, values))
            )
            output = attend(query, key, value, rule, block.mask(rule.window))
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        if len(outputs) == 1 and self._blocks[0].index is None:
            return outputs[0]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._back)


def similar_rows(counts_R: Ints, lengths_R: Ints, block_tokens: int) -> list[Ints]:
    """Rows grouped so that little of a padded block is padding: by new tokens, then by context."""
    groups: list[Ints] = []
    # Widths within a factor of two share a class; decoding rows (one new token) are one of their own.
    classes = np.ceil(np.log2(counts_R)).astype(np.int64)
    for width_class in np.unique(classes):
        rows = np.flatnonzero(classes == width_class)
        order = rows[np.argsort(-lengths_R[rows], kind="stable")]
        for first, stop in split_by_length(lengths_R[order], _PADDING, block_tokens):
            groups.append(np.sort(order[first:stop]))
    return groups


PAGED_BACKENDS: dict[str, BackendFactory] = {}
"""Backends by device type; a device that is not listed uses `GatherBackend`."""
