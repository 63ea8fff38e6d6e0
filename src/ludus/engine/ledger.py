"""Who holds which page of the KV cache, and which pages hold what.

Pure bookkeeping: a page is a number. A page is in exactly one of three states: free, held (one or more
holders), or kept (nobody holds it, but its content is known and may be found again; the one unused for
longest is given away first when free pages run out).
"""

from __future__ import annotations

from collections import OrderedDict


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
