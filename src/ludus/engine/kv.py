"""What each request and session holds of the KV cache, and how much of it a new context can reuse.

A holding is a list of pages and the number of tokens whose keys and values they contain. Full pages are
published under a digest of (policy version, everything before, their own tokens), so that any context
that starts with the same tokens finds them. Pages of a prompt are published when they are scheduled, not
when they have been computed: within one forward pass a layer writes all keys and values before it reads
any, so the members of a group that arrive together still compute their common prompt once. Pages that
decoding fills are published one step later, because a step decodes after it has computed its prompts; and
never before all of their tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from ludus.engine.ledger import PageLedger


@dataclass(slots=True, eq=False)
class Holding:
    """Pages in order, and what they contain."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    """How many tokens have their keys and values in the pages, or in steps that are under way."""
    digests: list[bytes] = field(default_factory=list)
    """One for each full page that has been published."""


class KvBooks:
    """Reuse, growth, fork and release of holdings over one ledger."""

    def __init__(self, pages: int, page_size: int, copy_page: Callable[[int, int], None]) -> None:
        self.ledger = PageLedger(pages)
        self.page_size = page_size
        self._copy_page = copy_page
        self._root = b""
        self.set_version(0)

    def set_version(self, version: int) -> None:
        """Nothing computed under another version is found from now on."""
        self.ledger.forget_contents()
        self._root = version.to_bytes(8, "big")

    def resize(self, pages: int) -> None:
        """Another number of pages; nothing may be held."""
        self.ledger = PageLedger(pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def reuse(self, tokens: Sequence[int], held: Holding, held_tokens: Sequence[int]) -> Holding:
        """The longest part of `tokens` that is held or published; takes `held` over.

        At least the last token is left to compute, because its hidden state is needed.
        """
        usable = len(tokens) - 1
        common = min(common_prefix(tokens, held_tokens), held.length, usable)
        digests = list(held.digests[: common // self.page_size])
        found = self._published(tokens, digests, usable // self.page_size)
        if found:
            full = len(digests) - len(found)
            for page in found:
                self.ledger.share(page)
            kept = held.pages[:full]
            self._release(held.pages[full:])
            return Holding(kept + found, len(digests) * self.page_size, digests)
        return self._truncated(held, common, digests)

    def _published(self, tokens: Sequence[int], digests: list[bytes], limit: int) -> list[int]:
        """The published pages that follow those of `digests`, which grows by their digests."""
        found: list[int] = []
        while len(digests) < limit:
            digest = self._digest(tokens, len(digests), digests)
            page = self.ledger.find(digest)
            if page is None:
                break
            found.append(page)
            digests.append(digest)
        return found

    def _truncated(self, held: Holding, length: int, digests: list[bytes]) -> Holding:
        """`held` cut to `length` tokens; a partial last page that others read is copied."""
        needed = self.pages_for(length)
        self._release(held.pages[needed:])
        pages = held.pages[:needed]
        if length % self.page_size and not self.ledger.is_writable(pages[-1]):
            fresh = self.ledger.allocate()
            if fresh is not None:
                self._copy_page(pages[-1], fresh)
            self._release([pages.pop()])
            if fresh is None:
                length = len(pages) * self.page_size
            else:
                pages.append(fresh)
        return Holding(pages, length, digests)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Pages for `tokens` tokens in all; False, and nothing taken, when there are not enough."""
        missing = self.pages_for(tokens) - len(holding.pages)
        if missing <= 0:
            return True
        if missing > self.ledger.available:
            return False
        for _ in range(missing):
            page = self.ledger.allocate()
            if page is None:
                raise AssertionError("the ledger promised a page that it does not have")
            holding.pages.append(page)
        return True

    def publish(self, holding: Holding, tokens: Sequence[int], length: int) -> None:
        """Let others find the pages that the first `length` tokens have filled; these must be known."""
        while (len(holding.digests) + 1) * self.page_size <= length:
            index = len(holding.digests)
            digest = self._digest(tokens, index, holding.digests)
            self.ledger.publish(holding.pages[index], digest)
            holding.digests.append(digest)

    def fork(self, holding: Holding) -> Holding:
        """A second holding of the same content: full pages shared, the partial one copied."""
        full = holding.length // self.page_size
        pages = holding.pages[:full]
        for page in pages:
            self.ledger.share(page)
        length = full * self.page_size
        if holding.length > length:
            fresh = self.ledger.allocate()
            if fresh is not None:
                self._copy_page(holding.pages[full], fresh)
                pages = [*pages, fresh]
                length = holding.length
        return Holding(list(pages), length, list(holding.digests[:full]))

    def drop(self, holding: Holding) -> None:
        """Give everything back; the holding is empty afterwards."""
        self._release(holding.pages)
        holding.pages, holding.length, holding.digests = [], 0, []

    def _release(self, pages: Sequence[int]) -> None:
        # Last pages first: what is kept is then given away from the end of a prefix, not its start.
        for page in reversed(pages):
            self.ledger.release(page)

    def _digest(self, tokens: Sequence[int], index: int, digests: Sequence[bytes]) -> bytes:
        parent = digests[index - 1] if index else self._root
        own = np.array(tokens[index * self.page_size : (index + 1) * self.page_size], dtype=np.int64)
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
