"""Who holds which page of the KV cache, and which pages hold what.

Pure bookkeeping: a page is a number. A page is in exactly one of three states: free, held (one or more
holders), or kept (nobody holds it, but its content is known and may be found again; the one unused for
longest is given away first when free pages run out).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np


class PageLedger:
    """Reference counts, the content index, and the free list of `pages` pages."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._holders = [0] * pages
        self._free: list[int] = []
        self._untouched = 0  # pages from here on were never used: memory follows the high-water mark
        self._content_of: dict[int, bytes] = {}
        self._page_with: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many pages `allocate` can still give."""
        return len(self._free) + self.pages - self._untouched + len(self._kept)

    @property
    def high_water(self) -> int:
        """One more than the highest page ever used."""
        return self._untouched

    def holders(self, page: int) -> int:
        """How many hold this page."""
        return self._holders[page]

    def allocate(self) -> int | None:
        """A page for one holder, its content forgotten; None when every page is held."""
        if self._free:
            page = self._free.pop()
        elif self._untouched < self.pages:
            page = self._untouched
            self._untouched += 1
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder."""
        if self._holders[page] == 0:
            if page not in self._kept:
                raise ValueError(f"page {page} is free and cannot be shared")
            del self._kept[page]
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one leaves the page kept if its content is published, else free."""
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is held by nobody and cannot be released")
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._content_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, content: bytes) -> None:
        """Let others find this full page by its content. The first page with a content stays the one."""
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is held by nobody and cannot be published")
        if content not in self._page_with and page not in self._content_of:
            self._page_with[content] = page
            self._content_of[page] = content

    def find(self, content: bytes) -> int | None:
        """The page with this content, if any; it is not held yet."""
        return self._page_with.get(content)

    def is_writable(self, page: int) -> bool:
        """Whether its one holder may change it: nobody else reads it, and nobody can find it."""
        return self._holders[page] == 1 and page not in self._content_of

    def forget_contents(self) -> None:
        """No page can be found any more; kept pages become free, held ones stay held."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._content_of.clear()
        self._page_with.clear()

    def _forget(self, page: int) -> None:
        del self._page_with[self._content_of.pop(page)]

    def check(self) -> None:
        """Raise if the books do not balance."""
        held = {page for page, count in enumerate(self._holders) if count > 0}
        free, kept = set(self._free), set(self._kept)
        untouched = set(range(self._untouched, self.pages))
        if len(free) != len(self._free) or free & held or free & kept or kept & held:
            raise AssertionError("a page is in two states at once")
        if free | kept | held | untouched != set(range(self.pages)) or untouched & (free | kept | held):
            raise AssertionError("a page was lost")
        if not kept <= set(self._content_of) <= kept | held:
            raise AssertionError("a page without known content is kept, or a free one can be found")
        if {page: content for content, page in self._page_with.items()} != self._content_of:
            raise AssertionError("the content index disagrees with itself")


# --- kv ---
# What each request and session holds of the KV cache, and how much of it a new context can reuse.
#
# A holding is a list of pages and the number of tokens whose keys and values they contain. Full pages are
# published under a digest of (policy version, everything before, their own tokens), so that any context
# that starts with the same tokens finds them. Pages of a prompt are published when they are scheduled, not
# when they have been computed: within one forward pass a layer writes all keys and values before it reads
# any, so the members of a group that arrive together still compute their common prompt once. Pages that
# decoding fills are published one step later, because a step decodes after it has computed its prompts; and
# never before all of their tokens are known.


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
