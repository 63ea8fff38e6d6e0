"""Attention contexts that read pages in place: one for decoding, one for prompts and new turns."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ludus.engine.dense import Rule
from ludus.kernels import paged_decode, paged_prefill, rotate_and_store
from ludus.kernels.rotary import store


class PageStore(Protocol):
    """Where the pages are."""

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [pages, Hkv, page_size, D]."""


class _PagedContext:
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


class DecodeContext(_PagedContext):
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


class PrefillContext(_PagedContext):
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
