"""The memory behind the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ludus.engine.attention import Rule, attend, attend_once, positional_mask
from ludus.engine.packed_attention import split_by_length
from ludus.kernels import paged_decode, paged_prefill, rotate_and_store
from ludus.kernels.layers import store


class PageMemory(Protocol):
    """What the engine asks of the memory behind its pages, wherever it is."""

    page_size: int

    @property
    def is_there(self) -> bool:
        """Whether there is memory, or it has been handed back."""

    def regain(self) -> int:
        """Have memory again; for how many pages."""

    def hand_back(self) -> None:
        """Give the memory to others for a while; what it held is lost."""

    def halve(self) -> bool:
        """Let go of the memory, to regain half of it; False if that would leave too little."""

    def copy_page(self, source: int, target: int) -> None:
        """Duplicate one page in every layer."""

    def clear(self) -> None:
        """Overwrite everything: a NaN in a page would spoil whoever gets the page next."""

    def free(self) -> None:
        """Give all memory back for good."""


class KvStore:
    """The pages of every layer, each [pages, Hkv, page_size, D]. Memory follows the pages in use.

    Heads come before positions, so that a run of pages, gathered head by head, is at once the contiguous
    [B, Hkv, length, D] that batched products want.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._size = 0
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def is_there(self) -> bool:
        return True

    def regain(self) -> int:
        return self.pages

    def hand_back(self) -> None:
        self.free()

    def halve(self) -> bool:
        return False

    def ensure(self, pages: int) -> None:
        """Have memory for the first `pages` pages."""
        if pages > self._size:
            self._size = min(self.pages, max(pages, 2 * self._size, 64))
            self._layers = {
                layer: (_grown(keys, self._size), _grown(values, self._size))
                for layer, (keys, values) in self._layers.items()
            }

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Put states [T, Hkv, D] into rows [T * Hkv] of the layer's pages, seen as one list; the pages."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer]
        keys.view(-1, keys.shape[3]).index_copy_(0, rows, key.flatten(0, 1))
        values.view(-1, values.shape[3]).index_copy_(0, rows, value.flatten(0, 1))
        return keys, values

    def _empty(self, states: Tensor) -> Tensor:
        return states.new_zeros(self._size, states.shape[1], self.page_size, states.shape[2])

    @property
    def token_bytes(self) -> int:
        """What the keys of one token take in a layer; a guess before anything was written."""
        layer = next(iter(self._layers.values()), None)
        return 512 if layer is None else layer[0][0, :, 0].nbytes

    def gather(self, pages: Tensor, index: Tensor, place: int) -> Tensor:
        """Copies of [page_size, D] pieces, in a buffer that the next gather at `place` overwrites."""
        pieces = pages.flatten(0, 1)
        size = len(index) * pieces.shape[1] * pieces.shape[2]
        buffer = self._scratch.get((place, pages.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = pages.new_empty(size)
            self._scratch[place, pages.dtype] = buffer
        out = buffer[:size].view(len(index), pieces.shape[1], pieces.shape[2])
        return torch.index_select(pieces, 0, index, out=out)

    def copy_page(self, source: int, target: int) -> None:
        self.ensure(target + 1)
        for keys, values in self._layers.values():
            keys[target] = keys[source]
            values[target] = values[source]

    def clear(self) -> None:
        for keys, values in self._layers.values():
            keys.zero_()
            values.zero_()

    def free(self) -> None:
        self._layers.clear()
        self._scratch.clear()
        self._size = 0


def _grown(pages: Tensor, size: int) -> Tensor:
    bigger = pages.new_zeros(size, *pages.shape[1:])
    bigger[: len(pages)] = pages
    return bigger


# --- paged ---
# Sampling attention: keys and values live in pages, and new tokens of many requests attend at once.
#
# `PagedBatch` says where the new tokens of a step belong and what they read, and `PagedContext` is the
# attention context over it and the store. It gathers pages and works everywhere; where the kernels run, the
# contexts of `cuda.contexts` read pages in place.

Ints = npt.NDArray[np.int64]

# Rows whose new tokens and contexts are of similar size share a padded block.
_PADDING = 0.2
# Keys of a block, and its values, take about this much: on a CPU what the nearest caches hold.
_BLOCK_BYTES = {"cpu": 1 << 21}
_BLOCK_BYTES_ELSEWHERE = 1 << 26


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


class PagedContext:
    """The attention context of one engine step."""

    def __init__(self, batch: PagedBatch, store: KvStore, device: torch.device) -> None:
        self._store = store
        self._slots = torch.from_numpy(batch.slots).to(device)
        self._rows: dict[int, Tensor] = {}
        self._gathered = GatheredPages(batch, store, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        heads = key.shape[1]
        if heads not in self._rows:
            size = self._store.page_size
            page, offset = self._slots // size, self._slots % size
            rows = _per_head(page[:, None], heads) * size + offset[:, None, None]
            self._rows[heads] = rows.flatten()
        keys, values = self._store.write(
            layer, key[0].transpose(0, 1), value[0].transpose(0, 1), self._rows[heads]
        )
        return self._gathered.attend(query[0].transpose(0, 1), keys, values, rule)[None]


@dataclass(slots=True)
class _Block:
    """Rows of similar shape."""

    rows: int
    width: int
    length: int
    index: Tensor | None
    """[rows * width] flat positions of the queries; None when they are all tokens in flat order."""
    pages: Tensor
    """[rows, pages per row]"""
    positions: Tensor
    """[rows, width] positions of the queries within their contexts."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    biases: dict[int | None, Tensor] = field(default_factory=dict)
    pieces: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = positional_mask(self.positions, self.length, window)
        return self.masks[window]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self.biases:
            mask = self.mask(window)[:, 0]
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self.biases[window] = bias.masked_fill_(~mask, torch.finfo(dtype).min)
        return self.biases[window]

    def piece_index(self, heads: int) -> Tensor:
        """Which [page_size, D] pieces of the store make up [rows, heads, length, D]."""
        if heads not in self.pieces:
            self.pieces[heads] = _per_head(self.pages, heads).flatten()
        return self.pieces[heads]


class GatheredPages:
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
                    pages=torch.from_numpy(batch.tables[chosen, :pages]).to(device),
                    positions=torch.from_numpy(lengths - counts + offsets).to(device),
                )
            )
        self._back = torch.from_numpy(back_T).to(device)
        if len(self._blocks) == 1 and np.array_equal(back_T, np.arange(base)):
            self._blocks[0].index = None

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        outputs: list[Tensor] = []
        heads = keys.shape[1]
        for block in self._blocks:
            query = query_THD if block.index is None else query_THD.index_select(0, block.index)
            query = query.view(block.rows, block.width, *query.shape[1:]).transpose(1, 2)
            key, value = (
                self._store.gather(pages, block.piece_index(heads), place).view(
                    block.rows, heads, block.length, pages.shape[3]
                )
                for place, pages in enumerate((keys, values))
            )
            # Half precision stays with the fused kernel, which keeps its scores in single precision.
            if block.width == 1 and rule.softcap is None and query.dtype == torch.float32:
                output = attend_once(query, key, value, rule, block.bias(rule.window, query.dtype))
            else:
                output = attend(query, key, value, rule, block.mask(rule.window))
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        if len(outputs) == 1 and self._blocks[0].index is None:
            return outputs[0]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._back)


def _per_head(pages: Tensor, heads: int) -> Tensor:
    """[R, heads, P] from pages [R, P]: where each head's part of a page lies."""
    return pages[:, None, :] * heads + torch.arange(heads, device=pages.device)[None, :, None]


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


# --- contexts ---
# Attention contexts that read pages in place: one for decoding, one for prompts and new turns.


class PageStore(Protocol):
    """Where the pages are."""

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [pages, Hkv, page_size, D]."""


class _KernelContext:
    """Writes the new tokens' keys and values to their slots, then attends over the pages."""

    def __init__(self, store: PageStore, slots_T: Tensor) -> None:
        self._store = store
        self._slots_T = slots_T

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """As a Hugging Face module calls it, with rotated states [1, H, T, D]."""
        keys, values = self._store.pages(layer)
        store(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, self._slots_T)
        return self._read(query[0].transpose(0, 1), keys, values, rule)[None]

    def attend_joint(
        self,
        layer: int,
        qkv_TC: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        heads: int,
        kv_heads: int,
        rule: Rule,
    ) -> Tensor:
        """As the fused forward calls it, with joint states that are not rotated yet; [T, Hq D]."""
        keys, values = self._store.pages(layer)
        query_THD = rotate_and_store(
            qkv_TC, cos_TD, sin_TD, heads, kv_heads, keys, values, self._slots_T
        )
        return self._read(query_THD, keys, values, rule).flatten(1)

    def _read(self, query_THD: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        raise NotImplementedError


class DecodeContext(_KernelContext):
    """One new token a row. An idle row has length 0 and a slot that nobody reads."""

    def __init__(self, store: PageStore, slots_R: Tensor, tables_RP: Tensor, lengths_R: Tensor) -> None:
        super().__init__(store, slots_R)
        self._tables_RP = tables_RP
        self._lengths_R = lengths_R

    def _read(self, query_THD: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        return paged_decode(
            query_THD,
            keys,
            values,
            self._tables_RP,
            self._lengths_R,
            scaling=rule.scaling,
            window=rule.window,
            softcap=rule.softcap,
        )


class PrefillContext(_KernelContext):
    """Several new tokens a row: row r has those from starts_R1[r] to starts_R1[r + 1]."""

    def __init__(
        self,
        store: PageStore,
        slots_T: Tensor,
        tables_RP: Tensor,
        starts_R1: Tensor,
        lengths_R: Tensor,
    ) -> None:
        super().__init__(store, slots_T)
        self._tables_RP = tables_RP
        self._starts_R1 = starts_R1
        self._lengths_R = lengths_R

    def _read(self, query_THD: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        return paged_prefill(
            query_THD,
            keys,
            values,
            self._tables_RP,
            self._starts_R1,
            self._lengths_R,
            scaling=rule.scaling,
            window=rule.window,
            softcap=rule.softcap,
        )
