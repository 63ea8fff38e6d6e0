"""The memory behind the KV cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


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
