"""The books of the KV cache under random histories: nothing leaked, freed twice or mixed up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ludus.engine.block_manager import Holding, KvBooks, PageLedger, common_prefix

PAGE = 4
tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=22)


class Books(RuleBasedStateMachine):
    """Contexts come, grow, fork and go; `memory` stands for what the pages really contain."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, list[tuple[int, ...]]] = {}
        self.books = KvBooks(12, PAGE, self.copy_page)
        self.version = 0
        self.held: list[tuple[Holding, list[int]]] = []

    def copy_page(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    def compute(self, holding: Holding, tokens: list[int], stop: int) -> None:
        """Write into each slot everything a real key depends on: version and prefix."""
        for position in range(holding.length, stop):
            page = holding.pages[position // PAGE]
            slots = self.memory.setdefault(page, [()] * PAGE)
            slots[position % PAGE] = (self.version, *tokens[: position + 1])
        holding.length = stop
        self.books.publish(holding, tokens, stop)

    @rule(tokens=tokens_lists)
    def start(self, tokens: list[int]) -> None:
        holding = self.books.reuse(tokens, Holding(), [])
        if self.books.grow(holding, len(tokens)):
            self.compute(holding, tokens, len(tokens))
            self.held.append((holding, tokens))
        else:
            self.books.drop(holding)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=tokens_lists, cut=st.integers(0, 30))
    def take_over(self, data: st.DataObject, more: list[int], cut: int) -> None:
        holding, tokens = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        following = tokens[:cut] + more
        fresh = self.books.reuse(following, holding, tokens)
        assert fresh.length < len(following)
        if self.books.grow(fresh, len(following)):
            self.compute(fresh, following, len(following))
            self.held.append((fresh, following))
        else:
            self.books.drop(fresh)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holding, tokens = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        copy = self.books.fork(holding)
        self.held.append((copy, tokens[: copy.length]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        holding, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.books.drop(holding)

    @rule()
    def change_weights(self) -> None:
        for holding, _ in self.held:
            self.books.drop(holding)
        self.held.clear()
        self.version += 1
        self.books.set_version(self.version)

    @invariant()
    def books_balance(self) -> None:
        self.books.ledger.check()
        holders = [page for holding, _ in self.held for page in holding.pages]
        for page in range(12):
            assert self.books.ledger.holders(page) == holders.count(page)

    @invariant()
    def pages_contain_what_their_holder_believes(self) -> None:
        for holding, tokens in self.held:
            for position in range(holding.length):
                slot = self.memory[holding.pages[position // PAGE]][position % PAGE]
                assert slot == (self.version, *tokens[: position + 1])


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=40)


def test_misuse_of_the_ledger_is_noticed() -> None:
    ledger = PageLedger(2)
    page = ledger.allocate()
    assert page is not None
    ledger.release(page)
    for misuse in (ledger.release, ledger.share, lambda p: ledger.publish(p, b"x")):
        with pytest.raises(ValueError, match="page"):
            misuse(page)


def test_the_page_unused_for_longest_is_given_away_first() -> None:
    ledger = PageLedger(3)
    for name in (b"a", b"b", b"c"):
        page = ledger.allocate()
        assert page is not None
        ledger.publish(page, name)
        ledger.release(page)
    kept = ledger.find(b"a")
    assert kept is not None
    ledger.share(kept)
    ledger.release(kept)
    assert ledger.allocate() is not None
    assert (ledger.find(b"a"), ledger.find(b"b")) == (kept, None)


@given(tokens_lists, tokens_lists)
def test_common_prefix(left: list[int], right: list[int]) -> None:
    count = common_prefix(left, right)
    assert left[:count] == right[:count]
    assert left[count : count + 1] != right[count : count + 1] or count == min(len(left), len(right))
