"""The pages of all layers in one allocation, whose address never changes."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.engine.cuda.reserved import Memory, memory_for

_log = logging.getLogger(__name__)

_FEWEST_PAGES = 16


class PageShape(NamedTuple):
    """What every layer keeps of a token."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype


class FixedStore:
    """Keys and values [pages + 1, Hkv, page_size, D] of every layer, allocated as a whole.

    The page after the last one is nobody's: rows of a step that are idle write there.
    """

    def __init__(
        self,
        shape: PageShape,
        pages: int,
        page_size: int,
        device: torch.device,
        memory: Memory | None = None,
    ) -> None:
        self.page_size = page_size
        self.count = pages
        self._shape = shape
        self._device = device
        self._memory = memory or memory_for(self._bytes(pages), device)
        self._all: Tensor | None = None

    @property
    def is_there(self) -> bool:
        return self._all is not None

    @property
    def spare_slot(self) -> int:
        """Where an idle row's keys and values go."""
        return self.count * self.page_size

    def regain(self) -> int:
        """Memory for as many pages as there were, or for half as many, and so on."""
        while True:
            try:
                taken = self._memory.take(self._bytes(self.count))
                break
            except torch.OutOfMemoryError:
                if self.count // 2 < _FEWEST_PAGES:
                    raise
                self.count //= 2
                _log.warning(
                    "there is no memory for the KV cache of %d tokens: trying half of it; a lower "
                    "engine.memory (or engine.cache_tokens) avoids this",
                    2 * self.count * self.page_size,
                )
        shape = self._shape
        # A NaN that others left here would spoil the first who reads beyond its own tokens.
        self._all = (
            taken.zero_()
            .view(shape.dtype)
            .view(2 * shape.layers, self.count + 1, shape.kv_heads, self.page_size, shape.head_size)
        )
        return self.count

    def hand_back(self) -> None:
        self._all = None
        self._memory.give_back()

    def halve(self) -> bool:
        if self.count // 2 < _FEWEST_PAGES:
            return False
        self._all = None
        self._memory.close()
        self.count //= 2
        self._memory = memory_for(self._bytes(self.count), self._device)
        return True

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, each [pages + 1, Hkv, page_size, D]."""
        everything = self._everything()
        return everything[2 * layer], everything[2 * layer + 1]

    def copy_page(self, source: int, target: int) -> None:
        everything = self._everything()
        everything[:, target].copy_(everything[:, source])

    def clear(self) -> None:
        if self._all is not None:
            self._all.zero_()

    def free(self) -> None:
        self._all = None
        self._memory.close()

    def _everything(self) -> Tensor:
        if self._all is None:
            raise RuntimeError("the KV cache's memory has been handed back")
        return self._all

    def _bytes(self, pages: int) -> int:
        layers, heads, size, dtype = self._shape
        return 2 * layers * (pages + 1) * heads * self.page_size * size * dtype.itemsize
